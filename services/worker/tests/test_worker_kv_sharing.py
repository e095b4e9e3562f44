"""A request that moves from one engine's process to another, which asks the first one for its KV."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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

from pilotlight.common.messages.engine import Abort
from pilotlight.common.messages.pipelines import DoorOpened, KvAt, OpenDoor
from pilotlight.policy.ids import InstanceId, NodeId, RequestId
from pilotlight.policy.request import FinishReason

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

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
