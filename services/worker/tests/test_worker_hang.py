"""Engines that hang, stopped or in a step that never ends: found within the patience they are
given.

And engines that only take long.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import faulty_child
import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import EngineFailed, MessageTooLarge
from pilotlight.common.messages import codec
from pilotlight.common.messages.engine import Run, StageLoaded, StepDone
from pilotlight.common.testing import until
from pilotlight.common.waiting import Backoff
from pilotlight.policy.hang import Doing, Patience
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engine_child.slate import Note, Slate, mark_of
from pilotlight.worker.engines.child_command import ChildOptions, new_slate
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.spare import Spare

pytestmark = pytest.mark.anyio

DEADLINE_S = 40.0
"""Far beyond every patience here, and far below what an engine without a watch would take: 300 s.
"""
PATIENCE = Patience(floor_s=1.0)
INSTANCE = InstanceId("inst-1")


class Listener:
    """One engine, and everything that it says."""

    def __init__(self, engine: ProcessEngine, pool: Any) -> None:
        self.engine, self.pool = engine, pool
        self._events = engine.events()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    async def until(self, kind: type, reached: Callable[[], bool] = lambda: True) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            async for told in self._events:
                event = told.message
                for produced in event.produced if isinstance(event, StepDone) else ():
                    self.tokens.setdefault(produced.request_id, []).extend(produced.token_ids)
                    if produced.finish is not None:
                        self.ends[produced.request_id] = produced.finish
                if isinstance(event, kind) and reached():
                    return event
                assert kind is EngineDied or not isinstance(event, EngineDied), event
        raise AssertionError(f"no {kind.__name__} came")

    async def load(self) -> None:
        await self.engine.load_stage(self.pool.load())
        for place in self.pool.places():
            await self.engine.place_part(place)
        await self.until(StageLoaded)

    async def run(
        self,
        name: str,
        prompt_tokens: int = 7,
        tokens: int = 40,
        output_ids: list[int] | None = None,
        first: int = 1,
    ) -> None:
        """``first``: the prompt's first token; another one shares no prefix."""
        sampling = Sampling(seed=1, max_tokens=tokens, temperature=0.0, ignore_eos=True)
        await self.engine.run(
            Run(
                request_id=RequestId(name),
                attempt=1,
                instance_id=INSTANCE,
                prompt_ids=[(first + place) % 90 for place in range(prompt_tokens)],
                output_ids=output_ids or [],
                sampling=sampling,
            )
        )

    async def end_of(self, name: str) -> None:
        await self.until(StepDone, lambda: name in self.ends)


MakeEngine = Callable[..., Awaitable[Listener]]


@pytest.fixture
async def make_engine(
    tmp_path: Path, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeEngine]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    made: list[ProcessEngine] = []

    async def make(faults: str = "", spare: bool = False) -> Listener:
        options = ChildOptions(
            threads=1, log_path=tmp_path / "engine.log", module="faulty_child", faults=faults
        )
        kept = Spare(options, Backoff(first_s=0.01, limit_s=0.05)) if spare else None
        engine = ProcessEngine(options, kept, patience=PATIENCE)
        made.append(engine)
        await engine.start()
        return Listener(engine, pool)

    yield make
    for engine in made:
        await engine.stop()


@pytest.mark.slow
async def test_an_engine_that_is_stopped_in_mid_stream_is_replaced_and_the_same_tokens_follow(
    make_engine: MakeEngine,
) -> None:
    one = await make_engine(faults="step=0.02")
    await one.load()
    await one.run("calm")
    await one.end_of("calm")
    await one.run("cut off")
    await one.until(StepDone, lambda: len(one.tokens.get("cut off", ())) > 5)
    assert one.engine.pid is not None
    os.kill(one.engine.pid, signal.SIGSTOP)
    died = await one.until(EngineDied)
    assert (died.hung, died.code) == (True, "engine_failed")
    assert "stopped for" in died.reason
    await one.engine.start()
    await one.load()
    await one.run("resumed", output_ids=one.tokens["cut off"])
    await one.end_of("resumed")
    assert one.tokens["cut off"] + one.tokens["resumed"] == one.tokens["calm"]


@pytest.mark.slow
async def test_a_step_that_never_ends_is_ended_and_one_that_takes_long_is_not(
    make_engine: MakeEngine,
) -> None:
    """Nothing is known of a model's first steps; then what they took is."""
    one = await make_engine()
    await one.load()
    assert PATIENCE.floor_s < faulty_child.SLOW_S
    for first, name in enumerate(("one", "two")):
        began_s = SystemClock().monotonic_s()
        await one.run(name, faulty_child.SLOW_TOKENS, tokens=2, first=first)
        await one.end_of(name)
        assert SystemClock().monotonic_s() - began_s > faulty_child.SLOW_S
    await one.engine.kill("a new one knows nothing")
    assert not (await one.until(EngineDied)).hung
    await one.engine.start()
    await one.load()
    await one.run("short", 40, tokens=30)
    await one.end_of("short")
    await one.run("endless", faulty_child.ENDLESS_TOKENS, first=50)
    died = await one.until(EngineDied)
    assert died.hung
    assert died.reason.startswith(
        f"a step of {faulty_child.ENDLESS_TOKENS} tokens has not ended for"
    )


@pytest.mark.slow
async def test_an_engine_that_is_stopped_while_it_has_nothing_to_do_or_loads_is_found_too(
    make_engine: MakeEngine,
) -> None:
    one = await make_engine(spare=True)
    first = one.engine.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    assert (await one.until(EngineDied)).hung
    await one.engine.start()
    await one.engine.load_stage(one.pool.load())
    assert one.engine.pid not in (None, first)
    os.kill(one.engine.pid or 0, signal.SIGSTOP)
    await one.engine.place_part(one.pool.places()[0])
    assert (await one.until(EngineDied)).hung


@pytest.mark.slow
async def test_a_command_that_is_too_large_is_nothing_that_an_engine_has_to_take(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await make_engine()
    await one.load()
    with monkeypatch.context() as small:
        small.setattr(codec, "MAX_FRAME_BYTES", 1024)
        with pytest.raises(MessageTooLarge):
            await one.run("too large", prompt_tokens=2000)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3 * PATIENCE.floor_s):
            await one.until(EngineDied)


@pytest.mark.slow
async def test_a_load_or_a_first_step_that_takes_long_is_no_hang(make_engine: MakeEngine) -> None:
    one = await make_engine(faults="load=1.5,prefill=1.5")
    await one.load()
    await one.run("first", tokens=3)
    await one.end_of("first")


@pytest.mark.slow
async def test_a_spare_that_is_stopped_serves_nobody_for_long(make_engine: MakeEngine) -> None:
    one = await make_engine(spare=True)
    pids = one.engine.pids
    await until(lambda: len(one.engine.pids) == 2, deadline_s=DEADLINE_S)
    (spare,) = one.engine.pids - pids
    os.kill(spare, signal.SIGSTOP)
    os.kill(one.engine.pid or 0, signal.SIGKILL)
    assert not (await one.until(EngineDied)).hung
    async with asyncio.timeout(DEADLINE_S):
        assert (await one.engine.start()).pid != spare


@pytest.mark.slow
async def test_a_start_that_is_stopped_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    # Nor can its log be written: here the name is one that no folder can have, elsewhere the disk
    # is full.
    (tmp_path / "file").touch()
    engine = ProcessEngine(
        ChildOptions(threads=1, log_path=tmp_path / "file" / "engine.log"), patience=PATIENCE
    )
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.pid is not None)
    os.kill(engine.pid or 0, signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineFailed, match="stopped for"):
            await starting
    await engine.start()
    assert engine.alive
    await engine.stop()


def test_a_slate_is_read_by_whoever_has_its_file() -> None:
    descriptor = new_slate()
    ours, theirs = Slate(descriptor), Slate(descriptor)
    os.close(descriptor)
    assert ours.read() == Note(0, 0, Doing.WAITING, 0, 0)
    theirs.obey()
    theirs.write(Doing.STEPPING, 512, mark_of(INSTANCE))
    assert ours.read() == Note(2, 1, Doing.STEPPING, 512, mark_of(INSTANCE))
    ours.close()
    theirs.close()
    Slate().write(Doing.TELLING)
