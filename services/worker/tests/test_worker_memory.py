"""What a real engine child takes beside what it was given, whatever batches it runs."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.common.messages.engine import (
    Run,
    StageFailed,
    StageLoaded,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import Sampling
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MIB = 1 << 20
DEADLINE_S = 100
AT_ONCE = 64
CONTEXT_TOKENS = 256
REQUESTS = 100
INSTANCE = InstanceId("inst-1")
BESIDE_BYTES = 112 * MIB
"""Compiled kernels are 65 MiB at most; the rest is what the heap keeps between two steps. Without a
bound these prompts alone take 670."""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ProcessEngine]:
    made = ProcessEngine(ChildOptions(threads=1, log_path=tmp_path / "engine.log"))
    await made.start()
    yield made
    await made.stop()


async def load(engine: ProcessEngine, events: AsyncIterator[Any], pool: Any) -> None:
    """In bfloat16: what torch compiles kernels for."""
    command = pool.load(kv_tokens=8192)
    await engine.load_stage(
        msgspec.structs.replace(command, model=replace(command.model, dtype=Dtype.BFLOAT16))
    )
    for place in pool.places():
        await engine.place_part(place)
    await until(events, StageLoaded)


async def unload(engine: ProcessEngine, events: AsyncIterator[Any]) -> None:
    await engine.unload_stage(UnloadStage(instance_id=INSTANCE))
    await until(events, StageUnloaded)


async def until(events: AsyncIterator[Any], kind: type) -> None:
    async for told in events:
        event = told.message
        assert not isinstance(event, EngineDied | StageFailed), event
        if isinstance(event, kind):
            return


async def serve(
    engine: ProcessEngine, events: AsyncIterator[Any], lengths: Sequence[int], at_once: int
) -> None:
    """Prompts of some lengths, ``at_once`` of them together; each gets all of its tokens."""
    missing: dict[str, int] = {}
    numbers = iter(range(len(lengths)))
    rng = random.Random(len(lengths))

    async def add() -> None:
        number = next(numbers, None)
        if number is not None:
            missing[f"req-{number}"] = tokens = rng.randrange(1, 8)
            prompt_ids = [rng.randrange(97) for _ in range(lengths[number])]
            sampling = Sampling(seed=1, max_tokens=tokens, temperature=0.0, ignore_eos=True)
            await engine.run(
                Run(
                    request_id=RequestId(f"req-{number}"),
                    attempt=1,
                    instance_id=INSTANCE,
                    prompt_ids=prompt_ids,
                    output_ids=[],
                    sampling=sampling,
                )
            )

    for _ in range(at_once):
        await add()
    while missing:
        event = (await anext(events)).message
        assert not isinstance(event, EngineDied), event
        for produced in event.produced if isinstance(event, StepDone) else ():
            missing[produced.request_id] -= len(produced.token_ids)
            if produced.finish is not None:
                assert missing.pop(produced.request_id) == 0, produced
                await add()


def resident_bytes(engine: ProcessEngine) -> int:
    return int(Path(f"/proc/{engine.pid}/statm").read_text().split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


async def test_batches_of_all_shapes_take_a_bounded_amount_of_memory_and_an_evicted_model_gives_back_its_own(
    engine: ProcessEngine, pool: Any
) -> None:
    events = engine.events()
    rng = random.Random(1)
    async with asyncio.timeout(DEADLINE_S):
        await load(engine, events, pool)
        await serve(engine, events, [5], 1)
        await unload(engine, events)
        idle = resident_bytes(engine)
        await load(engine, events, pool)
        given = pool.load(kv_tokens=8192).device_bytes
        await serve(engine, events, range(2, CONTEXT_TOKENS - 8), 1)
        await serve(
            engine, events, [rng.randrange(2, CONTEXT_TOKENS - 8) for _ in range(REQUESTS)], AT_ONCE
        )
        busy = resident_bytes(engine)
        await unload(engine, events)
        kept = resident_bytes(engine)
    print(
        f"idle {idle / MIB:.0f}, busy {busy / MIB:.0f}, given {given / MIB:.0f}, kept {kept / MIB:.0f} MiB"
    )
    assert busy - idle < given + BESIDE_BYTES
    assert kept - idle < BESIDE_BYTES
