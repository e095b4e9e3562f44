"""Several kinds of engine in one worker: each model on its own, and what one loses is no loss of
the others.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import EngineFailed, UnsupportedModel
from pilotlight.common.messages.engine import (
    Abort,
    LoadStage,
    PlacePart,
    Produced,
    ResizeStage,
    Run,
    StageFailed,
    StageLoaded,
    StageRefused,
    StageResized,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import (
    ConnectStage,
    DoorOpened,
    ExtendStage,
    OpenDoor,
    StageAddress,
    StageConnected,
)
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.policy.cost import EngineSpeed
from pilotlight.policy.ids import (
    InstanceId,
    NodeId,
    RequestId,
)
from pilotlight.policy.model import EngineKind, Model
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.client import EngineDied, EngineEvent
from pilotlight.worker.engines.sim import SimEngine
from pilotlight.worker.engines.switch import EngineSwitch

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0
SPEED = EngineSpeed(load_bytes_per_s=1e12, prefill_tokens_per_s=1e9, decode_step_s=0.001)
NATIVE, SIM = EngineKind.NATIVE, EngineKind.SIM


class Followed:
    """A switch over two simulated engines, one for each kind, and what it said."""

    def __init__(self, model: Model, kinds: tuple[EngineKind, ...]) -> None:
        self.model = model
        self.made: list[EngineKind] = []
        self.engines: dict[EngineKind, SimEngine] = {}
        self.events: list[EngineEvent] = []
        self.background = Background()
        self._news = asyncio.Event()

        def make(kind: EngineKind) -> SimEngine:
            self.made.append(kind)
            self.engines[kind] = SimEngine(SPEED, SystemClock())
            return self.engines[kind]

        self.switch = EngineSwitch(
            {kind: lambda kind=kind: make(kind) for kind in kinds}, self.background
        )
        self.switch.follow(self._on_event, self._on_steps)

    async def _on_steps(self, steps: Sequence[Timed[StepDone]]) -> None:
        for told in steps:
            await self._on_event(Timed(told.message, told.sent))

    async def _on_event(self, told: Timed[EngineEvent]) -> None:
        self.events.append(told.message)
        self._news.set()

    async def until(self, kind: type, matches: Callable[[Any], bool] = lambda _: True) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and matches(event):
                        return event
                self._news.clear()
                await self._news.wait()

    async def load(self, instance_id: str, engine: EngineKind) -> None:
        name, model = InstanceId(instance_id), replace(self.model, engine=engine)
        room = model.device_bytes(model.spec.whole) + 512 * model.spec.kv_bytes_per_token(
            model.spec.whole, model.dtype
        )
        await self.switch.load_stage(
            LoadStage(
                instance_id=name,
                model=model,
                stage=model.spec.whole,
                device_bytes=room,
                pool_path="",
            )
        )
        for part in model.spec.parts_of(model.spec.whole):
            await self.switch.place_part(PlacePart(instance_id=name, part=part, tensors=()))
        await self.until(StageLoaded, lambda event: event.instance_id == name)

    async def run(self, request_id: str, instance_id: str, max_tokens: int = 4) -> None:
        sampling = Sampling(seed=5, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        await self.switch.run(
            Run(
                request_id=RequestId(request_id),
                attempt=1,
                instance_id=InstanceId(instance_id),
                prompt_ids=[1, 2],
                output_ids=[],
                sampling=sampling,
            )
        )

    def produced(self, request_id: str) -> list[Produced]:
        steps = [event for event in self.events if isinstance(event, StepDone)]
        return [one for step in steps for one in step.produced if one.request_id == request_id]

    async def end_of(self, request_id: str) -> Produced:
        def ends(step: StepDone) -> bool:
            return any(one.request_id == request_id and one.finish for one in step.produced)

        await self.until(StepDone, ends)
        return self.produced(request_id)[-1]


Follow = Callable[..., Awaitable[Followed]]


async def unheard(command: UnloadStage) -> None:
    """What an engine does that dies before it obeys."""


@pytest.fixture
async def follow(model: Model) -> AsyncIterator[Follow]:
    made: list[Followed] = []

    async def start(*kinds: EngineKind) -> Followed:
        followed = Followed(model, kinds or (NATIVE, SIM))
        made.append(followed)
        await followed.switch.start()
        return followed

    yield start
    for followed in made:
        await followed.switch.stop()
        await followed.background.stop()


async def test_an_engine_is_made_for_the_first_model_that_asks_for_its_kind(follow: Follow) -> None:
    followed = await follow()
    assert followed.made == [NATIVE], "the main one starts with the worker"
    await followed.load("one", NATIVE)
    assert followed.made == [NATIVE]
    await followed.load("two", SIM)
    await followed.load("three", SIM)
    assert followed.made == [NATIVE, SIM]
    assert {kind: set(engine._stages) for kind, engine in followed.engines.items()} == {
        NATIVE: {"one"},
        SIM: {"two", "three"},
    }


async def test_requests_run_where_their_instance_is_and_a_step_says_what_all_have(
    follow: Follow,
) -> None:
    followed = await follow()
    await followed.load("one", NATIVE)
    await followed.load("two", SIM)
    await followed.run("long", "one", max_tokens=200)
    await followed.run("short", "two")
    assert (await followed.end_of("short")).finish is FinishReason.LENGTH
    both = await followed.until(StepDone, lambda step: step.running == 2)
    assert both.kv_used_tokens >= 4, "two prompts of two tokens, one in each engine"
    await followed.switch.abort(Abort(request_id=RequestId("long"), attempt=1))
    assert (await followed.end_of("long")).finish is FinishReason.CANCELLED
    await followed.run("lost", "nowhere")
    assert (await followed.end_of("lost")).code == "not_loaded"


async def test_a_dead_engine_takes_its_own_instances_along_and_starts_again_for_the_next(
    follow: Follow,
) -> None:
    followed = await follow()
    await followed.load("one", NATIVE)
    await followed.load("two", SIM)
    await followed.run("long", "one", max_tokens=100)
    await followed.switch.kill("a test", having=InstanceId("two"))
    died = await followed.until(EngineDied)
    assert (died.instances, followed.switch.alive) == ({"two"}, True)
    assert (await followed.end_of("long")).finish is FinishReason.LENGTH
    followed.events.clear()
    await followed.load("two", SIM)
    await followed.run("again", "two")
    assert (await followed.end_of("again")).finish is FinishReason.LENGTH
    await followed.engines[NATIVE].kill("a test")
    assert (await followed.until(EngineDied)).instances == {"one"}
    assert not followed.switch.alive
    with pytest.raises(EngineFailed):
        await followed.load("three", NATIVE)
    assert followed.switch.main.alive is False, "its worker starts it, when the device is well"


async def test_what_grows_a_stage_goes_to_the_engine_that_has_it(follow: Follow) -> None:
    """The main engine opens the door; it would refuse what concerns a stage of another engine."""
    followed = await follow()
    await followed.load("two", SIM)
    two, spec, switch = InstanceId("two"), followed.model.spec, followed.switch
    await switch.open_door(OpenDoor(node_id=NodeId("n"), host="h", secrets_dir=""))
    await followed.until(DoorOpened)
    room = followed.model.device_bytes(spec.whole)
    await switch.resize_stage(ResizeStage(instance_id=two, device_bytes=2 * room))
    await followed.until(StageResized)
    await switch.connect_stage(
        ConnectStage(
            instance_id=two,
            stage=spec.whole,
            behind=StageAddress(node_id=NodeId("n"), stage=spec.whole, host="h", port=1),
            timeout_s=1.0,
        )
    )
    await followed.until(StageConnected)
    await switch.extend_stage(
        ExtendStage(instance_id=two, stage=spec.whole, device_bytes=2 * room, pool_path="")
    )
    refused = await followed.until(StageRefused)
    assert refused.code == "invalid_request", (
        "it is whole; the main engine has no such stage, and would say so"
    )


async def test_the_death_of_the_only_engine_is_the_end_of_everything(follow: Follow) -> None:
    followed = await follow()
    await followed.load("one", NATIVE)
    await followed.switch.kill("a test", "device_failed")
    assert await followed.until(EngineDied) == EngineDied(reason="a test", code="device_failed")


async def test_a_kind_that_the_worker_does_not_have_is_refused(follow: Follow) -> None:
    followed = await follow(NATIVE)
    with pytest.raises(UnsupportedModel, match="kind sim, and this worker has native"):
        await followed.load("one", SIM)


async def test_an_unload_of_what_no_engine_has_is_confirmed_by_the_main_one_or_by_its_death(
    follow: Follow,
) -> None:
    followed = await follow()
    await followed.load("two", SIM)
    await followed.switch.unload_stage(UnloadStage(instance_id=InstanceId("never")))
    await followed.until(StageUnloaded, lambda event: event.instance_id == "never")
    assert set(followed.switch._routes) == {"two"}
    confirmed, followed.engines[NATIVE].unload_stage = (
        followed.engines[NATIVE].unload_stage,
        unheard,
    )
    await followed.switch.unload_stage(UnloadStage(instance_id=InstanceId("unheard")))
    followed.engines[NATIVE].unload_stage = confirmed
    await followed.engines[NATIVE].kill("a test")
    assert (await followed.until(EngineDied)).instances == {"unheard"}
    with pytest.raises(EngineFailed):
        await followed.switch.unload_stage(UnloadStage(instance_id=InstanceId("late")))
    assert set(followed.switch._routes) == {"two"}


async def test_an_instance_may_come_back_on_another_engine_while_its_unload_is_confirmed(
    follow: Follow,
) -> None:
    followed = await follow()
    await followed.load("one", NATIVE)
    await followed.switch.unload_stage(UnloadStage(instance_id=InstanceId("one")))
    await followed.load("one", SIM)
    await followed.run("after", "one")
    assert (await followed.end_of("after")).finish is FinishReason.LENGTH
    assert not followed.engines[NATIVE]._stages
    await followed.switch.unload_stage(UnloadStage(instance_id=InstanceId("one")))
    await until(lambda: not followed.switch._routes)


async def test_an_engine_that_dies_has_freed_what_is_on_another_one_by_now(follow: Follow) -> None:
    followed = await follow()
    one = InstanceId("one")
    await followed.load(one, SIM)
    followed.engines[SIM].unload_stage = unheard
    await followed.switch.unload_stage(UnloadStage(instance_id=one))
    await followed.load(one, NATIVE)
    await followed.engines[SIM].kill("a test")
    assert (await followed.until(EngineDied)).instances == set(), "it has been moved"
    await followed.until(StageUnloaded)
    await followed.run("after", one)
    assert (await followed.end_of("after")).finish is FinishReason.LENGTH


async def test_what_an_engine_says_of_an_instance_that_has_moved_is_not_heard(
    follow: Follow,
) -> None:
    followed = await follow()
    one = InstanceId("one")
    await followed.load(one, SIM)
    await followed.switch.unload_stage(UnloadStage(instance_id=one))
    await followed.load(one, NATIVE)
    followed.events.clear()
    await followed.engines[SIM]._say(StageFailed(instance_id=one, code="no_room", message="late"))
    await followed.engines[SIM].kill("a test")
    await followed.until(EngineDied)
    assert not [event for event in followed.events if isinstance(event, StageFailed)]
