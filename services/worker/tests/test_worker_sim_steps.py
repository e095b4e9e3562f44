"""Steps of a simulated engine that take no time: the same tokens, and others have their turn."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.engine import Abort, LoadStage, PlacePart, Produced, Run, StepDone
from pilotlight.policy.cost import EngineSpeed
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Model
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.sim import SimEngine
from pilotlight.worker.engines.sim_tokens import SimTokens

pytestmark = pytest.mark.anyio

INSTANCE = InstanceId("inst-1")
ROOM_TOKENS = 8192


class Engine:
    """A simulated engine with a model, and everything that it says of its steps."""

    def __init__(self, model: Model, decode_step_s: float) -> None:
        self.model = replace(model, spec=replace(model.spec, max_context_tokens=ROOM_TOKENS))
        speed = EngineSpeed(
            load_bytes_per_s=1e12, prefill_tokens_per_s=1e12, decode_step_s=decode_step_s
        )
        self.engine = SimEngine(speed, SystemClock())
        self.steps: list[StepDone] = []
        self._stepped = asyncio.Event()

    async def __aenter__(self) -> "Engine":
        await self.engine.start()
        self._hearing = asyncio.create_task(self._hear())
        spec = self.model.spec
        kv_bytes = ROOM_TOKENS * spec.kv_bytes_per_token(spec.whole, self.model.dtype)
        load = LoadStage(
            instance_id=INSTANCE,
            model=self.model,
            stage=spec.whole,
            device_bytes=self.model.device_bytes(spec.whole) + kv_bytes,
            pool_path="",
        )
        await self.engine.load_stage(load)
        for part in spec.parts_of(spec.whole):
            await self.engine.place_part(PlacePart(instance_id=INSTANCE, part=part, tensors=()))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.engine.stop()
        await self._hearing

    async def _hear(self) -> None:
        async for told in self.engine.events():
            if isinstance(told.message, StepDone):
                self.steps.append(told.message)
                self._stepped.set()

    async def run(self, name: str, max_tokens: int, stop: int | None = None) -> None:
        sampling = Sampling(
            seed=5,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=stop is None,
            stop_token_ids=() if stop is None else (stop,),
        )
        await self.engine.run(
            Run(
                request_id=RequestId(name),
                attempt=1,
                instance_id=INSTANCE,
                prompt_ids=[1, 2, 3],
                output_ids=[],
                sampling=sampling,
            )
        )

    def of(self, name: str) -> list[Produced]:
        return [one for step in self.steps for one in step.produced if one.request_id == name]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not holds():
                await self._stepped.wait()
                self._stepped.clear()


@pytest.mark.parametrize("decode_step_s", [0.0, 0.0002])
async def test_one_token_in_each_step_whatever_time_they_take(
    model: Model, decode_step_s: float
) -> None:
    async with Engine(model, decode_step_s) as engine:
        lengths = {"a": 1, "b": 33, "c": 20, "d": 33}
        for name, length in lengths.items():
            await engine.run(name, length)
        await engine.until(lambda: ended(engine, lengths))
        tokens = SimTokens.after(5, [1, 2, 3], model.spec.vocab_size)
        expected = [tokens.draw(with_logprob=False)[0] for _ in range(33)]
        for name, length in lengths.items():
            given = engine.of(name)
            assert [one.position for one in given] == list(range(length))
            assert [token for one in given for token in one.token_ids] == expected[:length]
            assert [one.finish for one in given] == [*[None] * (length - 1), FinishReason.LENGTH]
        for step in engine.steps:
            names = [one.request_id for one in step.produced]
            assert len(set(names)) == len(names)
        last = engine.steps[-1]
        assert (last.running, last.waiting, last.kv_used_tokens) == (0, 0, 0)


async def test_steps_without_time_stop_where_others_do(model: Model) -> None:
    tokens = SimTokens.after(5, [1, 2, 3], model.spec.vocab_size)
    expected = [tokens.draw(with_logprob=False)[0] for _ in range(12)]
    ends: list[list[list[int]]] = []
    for decode_step_s in (0.0, 0.0002):
        async with Engine(model, decode_step_s) as engine:
            await engine.run("a", 40, stop=expected[-1])
            await engine.run("b", 7, stop=expected[-1])
            await engine.until(lambda engine=engine: ended(engine, {"a": 0, "b": 0}))
            assert engine.of("a")[-1].finish is FinishReason.STOP
            ends.append(
                [[token for one in engine.of(name) for token in one.token_ids] for name in "ab"]
            )
    first = expected.index(expected[-1])
    assert ends[0] == ends[1] == [expected[:first], expected[: min(first, 7)]]


def ended(engine: Engine, names: dict[str, int]) -> bool:
    return all(given and given[-1].finish for given in map(engine.of, names))


async def test_others_have_their_turn_while_a_long_request_takes_no_time(model: Model) -> None:
    """It can be aborted, and a short one that comes later ends before it."""
    async with Engine(model, 0.0) as engine:
        await engine.run("long", 1000)
        await engine.until(lambda: bool(engine.of("long")))
        await engine.run("short", 2)
        await engine.until(lambda: ended(engine, {"short": 2}))
        await engine.engine.abort(Abort(request_id=RequestId("long"), attempt=1))
        await engine.until(lambda: ended(engine, {"long": 1}))
        given = engine.of("long")
        assert given[-1].finish is FinishReason.CANCELLED
        assert given[-1].position == len(given) - 1 < 1000
