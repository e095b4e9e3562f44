"""Stages of groups that have become whole: each is another instance's from now on."""

from typing import Any

import msgspec
import pytest

from pilotlight.common.messages.engine import StageRefused
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import PipelineLeft
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason
from pilotlight.worker.testing import INSTANCE, MakeRig, Rig

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
