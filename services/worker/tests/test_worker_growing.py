"""Two engines in processes of their own run one model; the leading one takes the other's layers
over in mid-generation.
"""

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pilotlight.common.messages.engine import (
    Abort,
    ExportKv,
    KvBytes,
    KvExported,
    LoadStage,
    PlacePart,
    ReleaseRequest,
    RequestReleased,
    ResizeStage,
    Run,
    StageLoaded,
    StageOpened,
    StageRefused,
    StageResized,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.common.messages.pipelines import (
    CallOffExtend,
    ConnectStage,
    DoorOpened,
    ExtendStage,
    OpenDoor,
    PipelineLeft,
    StageAddress,
    StageConnected,
    StageGrown,
)
from pilotlight.policy.ids import InstanceId, NodeId, RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.child_process import ChildOptions
from pilotlight.worker.engines.client import EngineDied
from pilotlight.worker.engines.process import ProcessEngine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

INSTANCE = InstanceId("inst-1")
HOST = "127.0.0.1"
WAIT_S = 120.0
KV_TOKENS = 8192
SAMPLING = Sampling(seed=5, max_tokens=8000, temperature=0.8, ignore_eos=True)


class Child:
    """An engine in a process, and everything that it has said."""

    def __init__(self, engine: ProcessEngine, name: str) -> None:
        self.engine = engine
        self.node_id = NodeId(name)
        self.said: list[Any] = []
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, FinishReason] = {}
        self.steps: list[StepDone] = []
        self.heard = asyncio.Condition()

    async def listen(self) -> None:
        async for told in self.engine.events():
            async with self.heard:
                self._hear(told.message)
                self.heard.notify_all()

    def _hear(self, event: Any) -> None:
        if not isinstance(event, StepDone):
            self.said.append(event)
            return
        self.steps.append(event)
        for produced in event.produced:
            if produced.code:
                self.ends[produced.request_id] = FinishReason.ERROR
                continue
            assert produced.position == len(self.tokens[produced.request_id])
            self.tokens[produced.request_id] += produced.token_ids
            if produced.finish is not None:
                self.ends[produced.request_id] = produced.finish

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.heard:
            await self.heard.wait_for(holds)

    async def says(self, kind: type) -> Any:
        """The first one of this kind; it is not found again."""
        await self.until(lambda: any(isinstance(event, kind | StageRefused) for event in self.said))
        found = next(event for event in self.said if isinstance(event, kind | StageRefused))
        self.said.remove(found)
        assert isinstance(found, kind), found
        return found

    async def refuses(self) -> StageRefused:
        """As ``says``."""
        await self.until(lambda: any(isinstance(event, StageRefused) for event in self.said))
        found = next(event for event in self.said if isinstance(event, StageRefused))
        self.said.remove(found)
        return found

    async def speaks(self, request_id: str, count: int) -> None:
        """Waits for ``count`` tokens more."""
        wanted = len(self.tokens[request_id]) + count
        await self.until(lambda: len(self.tokens[request_id]) >= wanted)


@asynccontextmanager
async def child(folder: Path, name: str) -> AsyncIterator[Child]:
    made = Child(ProcessEngine(ChildOptions(threads=1, log_path=folder / f"{name}.log")), name)
    listening = asyncio.create_task(made.listen())
    await made.engine.start()
    try:
        yield made
    finally:
        await made.engine.stop()
        await listening


def bytes_of(pool: Any, stage: Stage) -> int:
    model = pool.model
    return model.device_bytes(stage) + KV_TOKENS * model.spec.kv_bytes_per_token(stage, model.dtype)


async def load(one: Child, pool: Any, stage: Stage, instance_id: InstanceId = INSTANCE) -> None:
    await one.engine.load_stage(
        LoadStage(
            instance_id=instance_id,
            model=pool.model,
            stage=stage,
            device_bytes=bytes_of(pool, stage),
            pool_path=str(pool.path),
        )
    )
    await place(one, pool, pool.model.spec.parts_of(stage), instance_id)
    await one.says(StageLoaded)


async def place(
    one: Child, pool: Any, parts: Iterable[int], instance_id: InstanceId = INSTANCE
) -> None:
    for part in parts:
        await one.engine.place_part(
            PlacePart(instance_id=instance_id, part=part, tensors=pool.parts[part])
        )


async def extend(one: Child, pool: Any, stage: Stage) -> None:
    command = ExtendStage(
        instance_id=INSTANCE,
        stage=stage,
        device_bytes=bytes_of(pool, stage),
        pool_path=str(pool.path),
    )
    await one.engine.extend_stage(command)


async def speak(
    one: Child, request_id: str, sampling: Sampling, instance_id: InstanceId = INSTANCE
) -> None:
    await one.engine.run(
        Run(
            request_id=RequestId(request_id),
            attempt=1,
            instance_id=instance_id,
            prompt_ids=[*range(1, 70)],
            output_ids=[],
            sampling=sampling,
        )
    )


@asynccontextmanager
async def group(folder: Path, pool: Any, stages: list[Stage]) -> AsyncIterator[list[Child]]:
    """Engines that hold these stages, connected."""
    (folder / "cluster-key").write_text("a key of this cluster")
    (folder / "cluster-key").chmod(0o600)
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(child(folder, f"node-{stage.start}"))
            for stage in stages
        ]
        addresses: list[StageAddress] = []
        for one, stage in zip(members, stages, strict=True):
            await load(one, pool, stage)
            await one.engine.open_door(
                OpenDoor(node_id=one.node_id, host=HOST, secrets_dir=str(folder))
            )
            port = (await one.says(DoorOpened)).port
            addresses.append(StageAddress(node_id=one.node_id, stage=stage, host=HOST, port=port))
        for one, stage, behind in zip(members, stages, [*addresses[1:], addresses[0]], strict=True):
            command = ConnectStage(
                instance_id=INSTANCE, stage=stage, behind=behind, timeout_s=WAIT_S
            )
            await one.engine.connect_stage(command)
        for one in members:
            await one.says(StageConnected)
        assert (await members[0].says(StageOpened)).kv_capacity_tokens == KV_TOKENS
        yield members


async def tokens_alone(one: Child, pool: Any, count: int) -> list[int]:
    """What an engine says that has the model whole."""
    alone = InstanceId("alone")
    await load(one, pool, pool.model.spec.whole, alone)
    await speak(
        one, "alone", Sampling(seed=5, max_tokens=count, temperature=0.8, ignore_eos=True), alone
    )
    await one.until(lambda: "alone" in one.ends)
    return one.tokens["alone"]


async def test_a_stage_grows_twice_in_mid_stream(deep_pool: Any, tmp_path: Path) -> None:
    async with group(tmp_path, deep_pool, [Stage(0, 2), Stage(2, 4)]) as (lead, other):
        await speak(lead, "a", SAMPLING)
        for stage, parts in ((Stage(0, 3), [3]), (Stage(0, 4), [4, 5])):
            await lead.speaks("a", 10)
            await extend(lead, deep_pool, stage)
            await lead.speaks("a", 10)
            await place(lead, deep_pool, parts)
            grown = await lead.says(StageGrown)
            assert (grown.stage, grown.kv_capacity_tokens) == (stage, KV_TOKENS)
            assert grown.phases, "what the parts took"
        assert (await other.says(PipelineLeft)).code == ""
        await other.engine.unload_stage(UnloadStage(instance_id=INSTANCE))
        await other.says(StageUnloaded)
        await lead.speaks("a", 10)
        await lead.engine.resize_stage(
            ResizeStage(instance_id=INSTANCE, device_bytes=bytes_of(deep_pool, Stage(0, 4)) * 2)
        )
        assert (await lead.says(StageResized)).kv_capacity_tokens > KV_TOKENS
        await lead.speaks("a", 10)
        assert "a" not in lead.ends, "it grew in mid-stream"
        await lead.engine.abort(Abort(request_id=RequestId("a"), attempt=1))
        await lead.until(lambda: lead.ends.get("a") is FinishReason.CANCELLED)
        spoken = lead.tokens["a"]
        assert len(spoken) >= 60
        assert await tokens_alone(other, deep_pool, len(spoken)) == spoken
        assert not [
            event
            for event in (*lead.said, *other.said)
            if isinstance(event, PipelineLeft | EngineDied)
        ]


@pytest.mark.parametrize("placed", [[], [3], [3, 4]])
async def test_the_other_engine_is_killed_while_a_stage_grows(
    placed: list[int], deep_pool: Any, tmp_path: Path
) -> None:
    """The request is not lost: it runs again from its tokens, as soon as the parts are there."""
    async with group(tmp_path, deep_pool, [Stage(0, 2), Stage(2, 4)]) as (lead, other):
        await speak(lead, "a", SAMPLING)
        await lead.speaks("a", 10)
        await extend(lead, deep_pool, deep_pool.model.spec.whole)
        await place(lead, deep_pool, placed)
        await lead.speaks("a", 10)
        assert other.engine.pid is not None
        os.kill(other.engine.pid, signal.SIGKILL)
        await other.says(EngineDied)
        assert (await lead.says(PipelineLeft)).code == "worker_lost"
        await place(lead, deep_pool, [part for part in (3, 4, 5) if part not in placed])
        assert (await lead.says(StageGrown)).stage == deep_pool.model.spec.whole
        await lead.speaks("a", 10)
        await lead.engine.abort(Abort(request_id=RequestId("a"), attempt=1))
        await lead.until(lambda: lead.ends.get("a") is FinishReason.CANCELLED)
        spoken = list(lead.tokens["a"])
        assert await tokens_alone(lead, deep_pool, len(spoken)) == spoken


async def test_the_following_stage_grows_to_the_whole_model_and_goes_on_with_the_requests(
    deep_pool: Any, tmp_path: Path
) -> None:
    stages, whole = [Stage(0, 2), Stage(2, 4)], deep_pool.model.spec.whole
    async with group(tmp_path, deep_pool, stages) as (lead, other):
        await speak(lead, "a", SAMPLING)
        await lead.speaks("a", 10)
        await extend(other, deep_pool, whole)
        await place(other, deep_pool, [0, 1, 2])
        assert (await other.says(StageGrown)).stage == whole
        await lead.speaks("a", 10)
        assert not [event for event in other.said if isinstance(event, StageOpened)]
        request = {"instance_id": INSTANCE, "request_id": RequestId("a"), "attempt": 1}
        pieces: list[KvBytes] = []
        for one, layers in zip((lead, other), stages, strict=True):
            await one.engine.export_kv(ExportKv(layers=layers, **request))
            pieces += (await one.says(KvExported)).kv
        await lead.engine.release_request(ReleaseRequest(**request))
        outputs = (await lead.says(RequestReleased)).output_ids
        await lead.engine.unload_stage(UnloadStage(instance_id=INSTANCE))
        assert (await other.says(PipelineLeft)).code == "worker_lost"
        assert (await other.says(StageOpened)).kv_capacity_tokens == KV_TOKENS
        other.tokens["a"], before = list(outputs), len(other.steps)
        await other.engine.run(
            Run(
                prompt_ids=[*range(1, 70)],
                output_ids=outputs,
                sampling=SAMPLING,
                kv=tuple(pieces),
                **request,
            )
        )
        await other.speaks("a", 20)
        first = next(step for step in other.steps[before:] if step.batch_tokens)
        assert first.batch_tokens < 69, "what was computed is not computed again"
        await other.engine.abort(Abort(request_id=RequestId("a"), attempt=1))
        await other.until(lambda: other.ends.get("a") is FinishReason.CANCELLED)
        spoken = other.tokens["a"]
        assert await tokens_alone(lead, deep_pool, len(spoken)) == spoken


async def test_what_cannot_be_done_leaves_the_stages_as_they_are(
    deep_pool: Any, tmp_path: Path
) -> None:
    async with group(tmp_path, deep_pool, [Stage(0, 2), Stage(2, 4)]) as (lead, other):
        await speak(lead, "a", SAMPLING)
        await lead.speaks("a", 10)
        await extend(lead, deep_pool, Stage(0, 2))
        await extend(other, deep_pool, Stage(2, 3))
        await lead.engine.resize_stage(ResizeStage(instance_id=INSTANCE, device_bytes=1))
        for one, codes in ((lead, ["invalid_request", "conflict"]), (other, ["invalid_request"])):
            for code in codes:
                refused = await one.refuses()
                assert (refused.instance_id, refused.code) == (INSTANCE, code)
        await lead.speaks("a", 10)


async def test_parts_that_cannot_be_had_leave_the_stage_as_it_was(
    deep_pool: Any, tmp_path: Path
) -> None:
    async with group(tmp_path, deep_pool, [Stage(0, 2), Stage(2, 4)]) as (lead, _):
        await speak(lead, "a", SAMPLING)
        await lead.speaks("a", 10)
        await extend(lead, deep_pool, Stage(0, 4))
        await place(lead, deep_pool, [3])
        call_off = CallOffExtend(
            instance_id=INSTANCE, code="source_unavailable", message="it is gone"
        )
        await lead.engine.call_off_extend(call_off)
        refused = await lead.refuses()
        assert (refused.code, refused.message) == ("source_unavailable", "it is gone")
        await lead.speaks("a", 10)
        await extend(lead, deep_pool, Stage(0, 4))
        await place(lead, deep_pool, [3, 4, 5])
        assert (await lead.says(StageGrown)).stage == Stage(0, 4)
        await lead.speaks("a", 10)


async def test_a_request_moves_to_another_engine_with_its_kv(
    deep_pool: Any, tmp_path: Path
) -> None:
    whole = deep_pool.model.spec.whole
    async with child(tmp_path, "one") as one, child(tmp_path, "other") as other:
        for each in (one, other):
            await load(each, deep_pool, whole)
        await speak(one, "a", SAMPLING)
        await one.speaks("a", 20)
        request = {"instance_id": INSTANCE, "request_id": RequestId("a"), "attempt": 1}
        pieces: list[KvBytes] = []
        for layers in (Stage(0, 1), Stage(1, 4)):
            await one.engine.export_kv(ExportKv(layers=layers, **request))
            pieces += (await one.says(KvExported)).kv
        assert {piece.layers for piece in pieces} == {Stage(0, 1), Stage(1, 4)}
        await one.engine.release_request(ReleaseRequest(**request))
        outputs = (await one.says(RequestReleased)).output_ids
        assert outputs == one.tokens["a"], "nothing is told of it after that"
        other.tokens["a"] = list(outputs)
        run = Run(
            prompt_ids=[*range(1, 70)],
            output_ids=outputs,
            sampling=SAMPLING,
            kv=tuple(pieces),
            **request,
        )
        await other.engine.run(run)
        await other.speaks("a", 20)
        first = next(step for step in other.steps if step.batch_tokens)
        assert (
            first.batch_tokens
            <= len(outputs) - min(piece.start + piece.shape[2] for piece in pieces) + 69
        )
        await other.engine.abort(Abort(request_id=RequestId("a"), attempt=1))
        await other.until(lambda: other.ends.get("a") is FinishReason.CANCELLED)
        assert await tokens_alone(one, deep_pool, len(other.tokens["a"])) == other.tokens["a"]
        wrong = (replace(pieces[0], data=pieces[0].data[1:]),)
        await other.engine.run(replace(run, request_id=RequestId("b"), kv=wrong))
        await other.until(lambda: other.ends.get("b") is FinishReason.ERROR)
