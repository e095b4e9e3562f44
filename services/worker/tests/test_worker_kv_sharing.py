"""A request that moves from one engine's process to another, which asks the first one for its
KV.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import msgspec
import pytest
from engine_children import (
    HOST,
    INSTANCE,
    SAMPLING,
    Child,
    child,
    go_on,
    load,
    speak,
    stopped,
    tokens_alone,
)
from msgspec.structs import replace

from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.handshake import CHANNEL_PURPOSE, Identity
from pilotlight.common.messages.engine import Abort, Run
from pilotlight.common.messages.pipelines import DoorOpened, KvAt, OpenDoor
from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.kv_sharing import KvAsked
from pilotlight.policy.ids import InstanceId, NodeId, RequestId
from pilotlight.policy.request import FinishReason
from pilotlight.worker.engine_child import kv_sharing
from pilotlight.worker.engine_child.kv_sharing import KvSharing, Moved

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

AT = KvAt(instance_id=INSTANCE, node_id=NodeId("one"), host=HOST, port=1)

PROMPT_TOKENS = 69
"""Of ``speak`` and ``go_on``."""
BLOCK_TOKENS = 16


async def opened(one: Child, folder: Path) -> KvAt:
    """Where it can be asked."""
    command = OpenDoor(node_id=one.node_id, host=HOST, secrets_dir=str(folder))
    await one.engine.open_door(command)
    port = (await one.says(DoorOpened)).port
    return KvAt(instance_id=INSTANCE, node_id=one.node_id, host=HOST, port=port)


@asynccontextmanager
async def two(folder: Path, pool: Any) -> AsyncIterator[tuple[Child, Child, KvAt]]:
    """Engines that have the model whole, and where the first one can be asked for KV."""
    (folder / "cluster-key").write_text("a key of this cluster")
    (folder / "cluster-key").chmod(0o600)
    async with child(folder, "one") as one, child(folder, "other") as other:
        for each in (one, other):
            await load(each, pool, pool.model.spec.whole)
        at = await opened(one, folder)
        await opened(other, folder)
        yield one, other, at


async def began(one: Child, tokens: int = 40) -> list[int]:
    """A request that was on its way there."""
    await speak(one, "a", SAMPLING)
    await one.speaks("a", tokens)
    return list(await stopped(one, "a"))


async def first_batch(one: Child, outputs: list[int], kv_at: KvAt) -> int:
    """Tokens that it runs first of a request that comes to it."""
    before = len(one.steps)
    await go_on(one, "a", outputs, kv_at)
    await one.speaks("a", 20)
    return next(step.batch_tokens for step in one.steps[before:] if step.batch_tokens)


async def test_what_was_computed_is_not_computed_again(deep_pool: Any, tmp_path: Path) -> None:
    async with two(tmp_path, deep_pool) as (one, other, at):
        outputs = await began(one)
        assert await first_batch(other, outputs, at) <= BLOCK_TOKENS
        spoken = await stopped(other, "a")
        assert await tokens_alone(one, deep_pool, len(spoken)) == spoken


@pytest.mark.parametrize("wrong", ["instance", "node", "port"])
async def test_where_nobody_gives_it_all_is_computed(
    deep_pool: Any, tmp_path: Path, wrong: str
) -> None:
    async with two(tmp_path, deep_pool) as (one, other, at):
        outputs = await began(one)
        elsewhere = {
            "instance": replace(at, instance_id=InstanceId("another")),
            "node": replace(at, node_id=NodeId("another")),
            "port": replace(at, port=1),
        }[wrong]
        assert await first_batch(other, outputs, elsewhere) == PROMPT_TOKENS + len(outputs)
        spoken = await stopped(other, "a")
        assert await tokens_alone(one, deep_pool, len(spoken)) == spoken


async def test_one_that_is_asked_and_says_nothing_is_not_waited_for_long(
    deep_pool: Any, tmp_path: Path
) -> None:
    """A request that is not wanted any more meanwhile ends at once."""
    async with two(tmp_path, deep_pool) as (one, other, at):
        outputs = await began(one)
        pid = one.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await go_on(other, "left", outputs, at)
            await other.engine.abort(Abort(request_id=RequestId("left"), attempt=1))
            await other.until(lambda: other.ends.get("left") is FinishReason.CANCELLED)
            assert not any(step.batch_tokens for step in other.steps)
            assert await first_batch(other, outputs, at) == PROMPT_TOKENS + len(outputs)
        finally:
            os.kill(pid, signal.SIGCONT)
        spoken = await stopped(other, "a")
        assert await tokens_alone(one, deep_pool, len(spoken)) == spoken


# What is asked for, and what is not.


def run_of(number: int = 0, tokens: int = 40, kv_at: KvAt | None = AT) -> Run:
    return Run(
        request_id=RequestId(f"req-{number}"),
        attempt=2,
        instance_id=INSTANCE,
        prompt_ids=[*range(tokens)],
        output_ids=[],
        sampling=SAMPLING,
        kv_at=kv_at,
    )


def sharing(key: bytes = b"a key of this cluster") -> KvSharing:
    me = Identity(NodeId("other"), ClusterKey(key, CHANNEL_PURPOSE)) if key else None
    return KvSharing(monotonic, lambda: me, lambda: None)


def test_what_has_nowhere_to_ask_or_nothing_to_ask_for_runs_at_once() -> None:
    assert not sharing().asks(run_of(kv_at=None), monotonic())
    assert not sharing().asks(run_of(tokens=BLOCK_TOKENS), monotonic())
    assert not sharing(b"").asks(run_of(), monotonic()), "it has no key to prove"


def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_sharing, "MAX_ASKED", 3)
    kv = sharing()
    asked = [kv.asks(run_of(number), monotonic()) for number in range(5)]
    # Nobody is there: those that were asked for come back, without KV.
    back: list[Moved] = []
    deadline_s = monotonic() + 30
    while len(back) < sum(asked) and monotonic() < deadline_s:
        back += kv.moved()
    assert asked[:4] == [True, True, True, False]
    assert all(one.pieces == () for one in back)
    assert kv.asks(run_of(9), monotonic()), "there is a place again"


def test_what_cannot_be_read_is_not_there() -> None:
    """The engine, and who asks, go on."""

    class Broken:
        def shared_kv(
            self, instance_id: Any, token_ids: Any, layer: int, *, on_device: bool
        ) -> None:
            raise RuntimeError("out of memory")

    class Asking:
        """A channel whose other end asks, and hangs up when it is answered."""

        def __init__(self) -> None:
            self.said: list[bytes] = []
            self.closed = Event()

        @property
        def lost(self) -> bool:
            return bool(self.said)

        def offer_device(self, ring_bytes: int) -> None:
            """It has none."""

        def carries_device(self, timeout_s: float) -> bool:
            return False

        def receive(self, timeout_s: float) -> Frame:
            asked = KvAsked(instance_id=INSTANCE, token_ids=(1, 2))
            return Frame(msgspec.msgpack.encode(asked), memoryview(b""))

        def send(self, frame: Frame, timeout_s: float) -> None:
            self.said.append(frame.header)

        def close(self) -> None:
            self.closed.set()

    kv, channel = sharing(), Asking()
    kv.visit(channel)
    deadline_s = monotonic() + 30
    while not channel.said and monotonic() < deadline_s:
        kv.look(Broken())
    assert [msgspec.msgpack.decode(one) for one in channel.said] == [{"type": "kv_none"}]
    assert channel.closed.wait(30)
