"""Stages of groups that have become whole: each is another instance's from now on."""

from typing import Any

import msgspec
import pytest

from pilotlight.common.messages.engine import Run, StageRefused
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import KvAt, PipelineLeft
from pilotlight.policy.cluster import HeldState, Member
from pilotlight.policy.ids import InstanceId, NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason
from pilotlight.worker.testing import INSTANCE, WORKER, MakeRig, Rig

pytestmark = pytest.mark.anyio

NEW = InstanceId("inst-new")


def of_its_own(rig: Rig, *, grown_from: InstanceId = INSTANCE) -> Hold:
    """The instance that the stage is to be."""
    return msgspec.structs.replace(rig.a_hold(), instance_id=NEW, grown_from=grown_from)


async def grown(rig: Rig) -> None:
    """A stage that does not begin the model, and has all of it now."""
    await rig.command(msgspec.structs.replace(rig.a_hold(), stage=Stage(1, 2)))
    await rig.state(HeldState.READY)
    await rig.command(rig.a_hold(generation=2))
    await rig.until(lambda: rig.held() is not None and rig.held().generation == 2)


def held(rig: Rig) -> dict[InstanceId, HeldState]:
    return {one.instance_id: one.state for one in rig.facts.held}


@pytest.mark.parametrize("process", [False, True])
async def test_a_stage_that_has_become_whole_serves_under_its_own_name(
    make_rig: MakeRig, leases: Any, process: bool
) -> None:
    """Nothing is loaded anew for that, and what it was is not held any more."""
    rig = await make_rig(process=process)
    await grown(rig)
    asked = len(leases.asked)
    await rig.command(of_its_own(rig))
    await rig.until(lambda: held(rig) == {NEW: HeldState.READY})
    assert len(leases.asked) == asked
    assert (await rig.submit("req-old")).code == "not_loaded"
    assert (await rig.submit("req-new", instance_id=NEW)).accepted
    assert (await rig.finish_of("req-new")).finish is FinishReason.LENGTH
    await rig.command(of_its_own(rig))
    assert held(rig) == {NEW: HeldState.READY}, "said again, it changes nothing"
    await rig.command()
    await rig.until(lambda: held(rig) == {})


async def test_the_engine_is_told_where_a_request_ran_before_that_comes_from_the_group(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    await grown(rig)
    whole = rig.model.spec.whole
    lead = Member(
        worker_id=WorkerId("lead"), node_id=NodeId("node-2"), stage=whole, host="h", port=7
    )
    mine = Member(worker_id=WORKER, node_id=NodeId("node-1"), stage=whole, host="i", port=8)
    rig.worker.stages.held[INSTANCE].renew(
        msgspec.structs.replace(rig.a_hold(generation=2), members=(lead, mine))
    )
    await rig.command(of_its_own(rig))
    await rig.until(lambda: held(rig) == {NEW: HeldState.READY})
    engine, ran = rig.worker.core.engine, dict[str, KvAt | None]()
    runs = engine.run_soon

    def run_soon(run: Run) -> bool:
        ran[run.request_id] = run.kv_at
        return runs(run)

    monkeypatch.setattr(engine, "run_soon", run_soon)
    for name, moved_from in (("new", None), ("moved", INSTANCE), ("lost", InstanceId("another"))):
        assert (await rig.submit(name, instance_id=NEW, moved_from=moved_from)).accepted
        await rig.finish_of(name)
    at = KvAt(instance_id=INSTANCE, node_id=NodeId("node-2"), host="h", port=7)
    assert ran == {"new": None, "moved": at, "lost": None}


async def test_what_is_in_its_pipeline_still_is_renamed_when_it_has_left(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await grown(rig)
    stages = rig.worker.stages
    stages.held[INSTANCE].joined = True
    await rig.command(of_its_own(rig))
    assert held(rig) == {INSTANCE: HeldState.READY}
    stages.on_pipeline_left(PipelineLeft(instance_id=INSTANCE))
    await rig.until(lambda: held(rig) == {NEW: HeldState.READY})


async def test_what_has_nothing_to_be_made_of_is_loaded(make_rig: MakeRig, leases: Any) -> None:
    """As after the death of an engine."""
    rig = await make_rig()
    await rig.command(of_its_own(rig))
    await rig.until(lambda: held(rig) == {NEW: HeldState.READY})
    assert len(leases.asked) == 1


async def test_a_stage_that_the_engine_does_not_rename_is_loaded_anew(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig()
    await grown(rig)
    asked = len(leases.asked)
    renames, renamed = rig.worker.stages.renames, rig.worker.core.engine.rename_stage

    async def refused(_: Any) -> None:
        renames.on_refused(
            StageRefused(instance_id=INSTANCE, code="conflict", message="it has requests")
        )

    rig.worker.core.engine.rename_stage = refused
    await rig.command(of_its_own(rig))
    await rig.until(lambda: held(rig).get(INSTANCE) is HeldState.FAILED)
    rig.worker.core.engine.rename_stage = renamed
    await rig.command(of_its_own(rig))
    await rig.until(lambda: held(rig) == {NEW: HeldState.READY})
    assert len(leases.asked) == asked + 1


async def test_what_is_let_go_while_it_is_renamed_is_freed(make_rig: MakeRig) -> None:
    """The engine knows it by its new name when it is asked to free it by the old one."""
    rig = await make_rig()
    await grown(rig)
    await rig.command(of_its_own(rig))
    await rig.command()
    await rig.until(lambda: held(rig) == {})
    await rig.command(rig.a_hold(generation=5))
    await rig.until(lambda: held(rig) == {INSTANCE: HeldState.READY})
