"""A child whose device runs out of memory, or whose context is lost: what it says, and what goes
on.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import faulty_child
import pytest
from structlog.testing import capture_logs

from pilotlight.common.errors import EngineFailed as Refused
from pilotlight.common.messages.engine import Run, StageLoaded, StepDone
from pilotlight.engine.errors import EngineFailed
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engine_child.pins import Pins
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.spare import Spare

pytestmark = pytest.mark.anyio

DEADLINE_S = 30.0


class Listener:
    def __init__(self, engine: ProcessEngine) -> None:
        self.events = engine.events()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}

    async def until(self, kind: type, reached: Callable[[], bool] = lambda: True) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            async for told in self.events:
                event = told.message
                for produced in event.produced if isinstance(event, StepDone) else ():
                    self.tokens.setdefault(produced.request_id, []).extend(produced.token_ids)
                    if produced.finish is not None:
                        self.ends[produced.request_id] = produced
                if isinstance(event, kind) and reached():
                    return event
        raise AssertionError(f"no {kind.__name__} came")

    async def end_of(self, request_id: str) -> Any:
        await self.until(StepDone, lambda: request_id in self.ends)
        return self.ends[request_id]


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessEngine]:
    # The child finds this program, too.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    made = ProcessEngine(
        ChildOptions(threads=1, log_path=tmp_path / "engine.log", module="faulty_child")
    )
    yield made
    await made.stop()


def run(sampling: Sampling, request_id: str, prompt_tokens: int) -> Run:
    return Run(
        request_id=RequestId(request_id),
        attempt=1,
        instance_id=InstanceId("inst-1"),
        prompt_ids=[1 + place % 90 for place in range(prompt_tokens)],
        output_ids=[],
        sampling=sampling,
    )


async def loaded(engine: ProcessEngine, listener: Listener, pool: Any) -> None:
    await engine.load_stage(pool.load())
    for place in pool.places():
        await engine.place_part(place)
    await listener.until(StageLoaded)


@pytest.mark.slow
async def test_a_batch_without_memory_ends_the_request_that_wants_it_and_no_other(
    engine: ProcessEngine, pool: Any, greedy: Callable[[int], Sampling]
) -> None:
    up = await engine.start()
    listener = Listener(engine)
    await loaded(engine, listener, pool)
    await engine.run(run(greedy(60), "alone", 7))
    await listener.end_of("alone")
    await engine.run(run(greedy(60), "beside", 7))
    await listener.until(StepDone, lambda: len(listener.tokens.get("beside", ())) > 3)
    await engine.run(run(greedy(60), "large", faulty_child.NO_ROOM_TOKENS))
    large = await listener.end_of("large")
    assert (large.finish, large.code, large.position) == (FinishReason.ERROR, "engine_failed", 0)
    assert large.message.startswith("the device has no memory for a batch")
    await listener.end_of("beside")
    assert listener.tokens["beside"] == listener.tokens["alone"]
    await engine.run(run(greedy(3), "after", faulty_child.NO_ROOM_TOKENS + 1))
    assert (await listener.end_of("after")).finish is FinishReason.LENGTH
    assert engine.pid == up.pid


@pytest.mark.slow
async def test_a_lost_context_ends_the_child_with_its_last_words(
    engine: ProcessEngine, pool: Any, greedy: Callable[[int], Sampling], tmp_path: Path
) -> None:
    up = await engine.start()
    listener = Listener(engine)
    await loaded(engine, listener, pool)
    await engine.run(run(greedy(12), "before", 7))
    await listener.end_of("before")
    await engine.run(run(greedy(12), "ill", faulty_child.ILLEGAL_TOKENS))
    died = await listener.until(EngineDied)
    assert died.code == "engine_failed"
    assert died.reason == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "engine_fault" in (tmp_path / "engine.log").read_text()
    again = await engine.start()
    assert again.pid != up.pid
    await loaded(engine, listener, pool)
    await engine.run(run(greedy(12), "again", 7))
    await listener.end_of("again")
    assert listener.tokens["again"] == listener.tokens["before"]


@pytest.mark.slow
async def test_a_child_that_is_killed_and_keeps_its_socket_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    holder = tmp_path / "holder"
    monkeypatch.setenv("HOLDING_PID_FILE", str(holder))
    engine = ProcessEngine(
        ChildOptions(threads=1, log_path=tmp_path / "engine.log", module="holding_child")
    )
    events = engine.events()
    await engine.start()
    try:
        await engine.kill("wedged: the driver does not answer", "device_failed")
        async with asyncio.timeout(DEADLINE_S):
            died = (await anext(events)).message
        assert died == EngineDied(reason="wedged: the driver does not answer", code="device_failed")
        assert not engine.alive
    finally:
        os.kill(int(await asyncio.to_thread(holder.read_text)), signal.SIGKILL)
    await engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [False, True])
async def test_a_stop_does_not_wait_for_a_socket_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    holder = tmp_path / "holder"
    monkeypatch.setenv("HOLDING_PID_FILE", str(holder))
    engine = ProcessEngine(
        ChildOptions(threads=1, log_path=tmp_path / "engine.log", module="holding_child")
    )
    up = await engine.start()
    try:
        if stuck:
            # It reads no more, and more is to be sent than the socket holds: what is closed in
            # order waits for that.
            os.kill(up.pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await engine.run(run(Sampling(seed=1, max_tokens=1), "large", 1 << 21))
        async with asyncio.timeout(DEADLINE_S):
            await engine.stop()
        assert not engine.alive
        with pytest.raises(ProcessLookupError):
            os.kill(up.pid, 0)
    finally:
        os.kill(int(await asyncio.to_thread(holder.read_text)), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["open_device", "warm_up"])
async def test_a_device_that_fails_at_the_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("UNREADY_DIR", str(tmp_path))
    monkeypatch.setenv("UNREADY_AT", step)
    log_path = tmp_path / "engine.log"
    engine = ProcessEngine(ChildOptions(threads=1, log_path=log_path, module="unready_child"))
    with pytest.raises(
        Refused,
        match="did not start: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ):
        await engine.start()
    assert "engine_fault" in log_path.read_text()
    await engine.stop()


@pytest.mark.slow
async def test_a_spare_that_has_opened_its_device_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    spare = Spare(ChildOptions(threads=1, log_path=tmp_path / "engine.log", module="opening_child"))
    with pytest.raises(Refused, match="opened its device"):
        await spare._make_and_watch()
    assert spare.pid is None


class Slabs:
    """Remembers what was pinned, and refuses when told to."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.closed = 0
        self.refuses = False

    def pin_next(self, wanted: Any = ()) -> bool:
        if self.refuses:
            raise EngineFailed("no")
        self.pinned += wanted
        return True

    def close(self) -> None:
        self.closed += 1


def test_what_was_loaded_last_is_pinned_first_and_nothing_else() -> None:
    slabs = Slabs()
    pins = Pins(lambda pool, slab_bytes: slabs, slab_bytes=100)
    pins.want(0, 50)
    pins.pin_one()
    assert not pins.waiting, "there is no pool yet"
    pins.moved(memoryview(b""))
    pins.want(50, 250)
    pins.want(990, 1000)
    assert pins.waiting
    with capture_logs() as said:
        while pins.waiting:
            pins.pin_one()
    assert slabs.pinned == [900, 200, 100, 0]
    assert [line["pinned_bytes"] for line in said] == [400], "told once, when all of it is"
    pins.want(120, 130)
    assert not pins.waiting, "it is pinned"
    pins.moved(memoryview(b""))
    assert slabs.closed == 1
    pins.want(120, 130)
    slabs.refuses = True
    pins.pin_one()
    pins.want(500, 510)
    assert not pins.waiting, "after a refusal the rest goes through the ring"
    pins.pin_one()
    pins.moved(memoryview(b""))
    assert slabs.closed == 2, "what was pinned is taken back before its pages go"
    pins.want(500, 510)
    assert not pins.waiting
