"""Stages of a group that are joined while their parts come."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import ConnectStage, StageConnected, VouchStage
from pilotlight.common.testing import until
from pilotlight.policy.cluster import HeldState, Member
from pilotlight.policy.ids import Generation, NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason
from pilotlight.worker.engines.sim import SIM_PORT
from pilotlight.worker.testing import INSTANCE, WORKER, MakeRig, Rig

pytestmark = pytest.mark.anyio


def held_by(rig: Rig, stage: Stage) -> Hold:
    """One of two stages, all of whose members can be reached."""
    mine = Member(worker_id=WORKER, node_id=NodeId("node-1"), stage=stage, host="h", port=SIM_PORT)
    other = Member(
        worker_id=WorkerId("other"),
        node_id=NodeId("node-2"),
        stage=Stage(0, 1) if stage.start else Stage(1, 2),
        host="h",
        port=7,
    )
    members = tuple(sorted((mine, other), key=lambda member: member.stage.start))
    return msgspec.structs.replace(rig.a_hold(), stage=stage, members=members)


@pytest.fixture
async def told(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, list[Any]]:
    """A worker, and what it tells its engine of pipelines, which joins stages that load."""
    rig = await make_rig()
    engine, said = rig.worker.core.engine.main, list[Any]()

    async def connected(command: ConnectStage) -> None:
        said.append(command)
        await engine._say(StageConnected(instance_id=command.instance_id))
        if command.stage.start == 0:
            stage = engine._stages[command.instance_id]
            stage.leads = True
            await engine._open(command.instance_id, stage)

    async def vouched(command: VouchStage) -> None:
        said.append(command)

    monkeypatch.setattr(engine, "connect_stage", connected)
    monkeypatch.setattr(engine, "vouch_stage", vouched)
    return rig, said


async def test_a_stage_is_joined_while_its_parts_come_and_vouched_for_after(
    told: tuple[Rig, list[Any]], leases: Any
) -> None:
    rig, said = told
    leases.gate.clear()
    await rig.command(held_by(rig, Stage(0, 1)))
    held = await rig.until(lambda: (now := rig.held()) is not None and now.open and now)
    assert held.state is HeldState.LOADING
    assert (await rig.submit()).accepted, "the gateway may hand requests over"
    (connect,) = said
    assert isinstance(connect, ConnectStage)
    assert not connect.proven
    leases.gate.set()
    await rig.state(HeldState.READY)
    assert said[1:] == [VouchStage(instance_id=INSTANCE)]
    assert (await rig.finish_of()).finish is FinishReason.LENGTH


async def test_a_stage_that_is_loaded_is_joined_as_one(
    told: tuple[Rig, list[Any]],
) -> None:
    rig, said = told
    hold = held_by(rig, Stage(1, 2))
    unknown = tuple(replace(one, port=0) for one in hold.members)
    await rig.command(msgspec.structs.replace(hold, members=unknown))
    await rig.state(HeldState.READY)
    assert said == [VouchStage(instance_id=INSTANCE)]
    await rig.command(hold)
    await until(lambda: len(said) == 2)
    assert said[1].proven


async def test_a_stage_whose_parts_were_not_whole_is_not_vouched_for(
    told: tuple[Rig, list[Any]], leases: Any
) -> None:
    """What it computed has not left its engine, and never does."""
    rig, said = told
    leases.gate.clear()
    await rig.command(held_by(rig, Stage(1, 2)))
    await rig.state(HeldState.LOADING)
    await until(lambda: rig.worker.stages.held[INSTANCE].joined)
    leases.intact = False
    leases.gate.set()
    held = await rig.state(HeldState.FAILED)
    assert held is not None
    assert held.reason.startswith("source_changed")
    assert not any(isinstance(one, VouchStage) for one in said)


async def test_a_stage_that_drains_while_its_parts_come_goes_at_once(
    told: tuple[Rig, list[Any]], leases: Any
) -> None:
    """The requests of the stage that leads cannot end by it: they go on elsewhere."""
    rig, _ = told
    leases.gate.clear()
    hold = held_by(rig, Stage(1, 2))
    await rig.command(hold)
    await rig.state(HeldState.LOADING)
    await until(lambda: rig.worker.stages.held[INSTANCE].joined)
    await rig.command(msgspec.structs.replace(hold, generation=Generation(2), draining=True))
    await rig.state(None)
    assert leases.open == 0
