"""Two engines in processes of their own run one model; the leading one takes the other's layers
over in mid-generation.
"""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_children import (
    HOST,
    INSTANCE,
    KV_TOKENS,
    SAMPLING,
    WAIT_S,
    Child,
    bytes_of,
    child,
    go_on,
    load,
    place,
    speak,
    stopped,
    tokens_alone,
)

from pilotlight.common.messages.engine import (
    Abort,
    ResizeStage,
    StageOpened,
    StageResized,
    StageUnloaded,
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
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason
from pilotlight.worker.engines.client import EngineDied

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def extend(one: Child, pool: Any, stage: Stage) -> None:
    command = ExtendStage(
        instance_id=INSTANCE,
        stage=stage,
        device_bytes=bytes_of(pool, stage),
        pool_path=str(pool.path),
    )
    await one.engine.extend_stage(command)


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
        outputs = await stopped(lead, "a")
        await lead.engine.unload_stage(UnloadStage(instance_id=INSTANCE))
        assert (await other.says(PipelineLeft)).code == "worker_lost"
        assert (await other.says(StageOpened)).kv_capacity_tokens == KV_TOKENS
        await go_on(other, "a", outputs)
        await other.speaks("a", 20)
        spoken = await stopped(other, "a")
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
