"""Stages that get a longer range, and groups whose members are joined."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pilotlight.common.errors import SourceUnavailable
from pilotlight.common.messages.engine import StageFailed
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import ConnectStage, PipelineLeft
from pilotlight.common.testing import until
from pilotlight.policy.cluster import FetchPriority, HeldState, Member
from pilotlight.policy.ids import Generation, InstanceId, NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason
from pilotlight.worker.engines.sim import SIM_PORT
from pilotlight.worker.held import Held
from pilotlight.worker.testing import INSTANCE, WORKER, MakeRig, Rig

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("process", [False, True])
async def test_a_stage_grows_in_place_under_a_newer_generation(
    make_rig: MakeRig, leases: Any, process: bool
) -> None:
    rig = await make_rig(process=process)
    await rig.command(msgspec.structs.replace(rig.a_hold(), stage=Stage(0, 1)))
    await rig.state(HeldState.READY)
    longer = rig.a_hold(generation=2)
    leases.gate.clear()
    await rig.command(longer)
    await rig.until(lambda: leases.open == 1)
    assert leases.priorities == [FetchPriority.COLD_START, FetchPriority.PREFETCH], (
        "a group serves while it grows"
    )
    assert [parts for _, parts, _ in leases.asked] == [(0, 1), (2, 3)], (
        "what it has is not asked for again"
    )
    held = rig.held()
    assert held is not None
    assert (held.state, held.generation, held.stage) == (HeldState.READY, 1, Stage(0, 1))
    leases.gate.set()
    await rig.until(lambda: rig.held() is not None and rig.held().generation == 2)
    held = rig.held()
    assert held is not None
    assert (held.state, held.stage, held.device_bytes) == (
        HeldState.READY,
        Stage(0, 2),
        longer.device_bytes,
    )
    assert (await rig.submit()).accepted
    assert (await rig.finish_of()).finish is FinishReason.LENGTH
    await rig.command()
    await rig.state(None)
    assert leases.open == 0


async def joined(rig: Rig) -> Hold:
    """The leading one of two stages; the other one is taken to be there."""
    first = Member(worker_id=WORKER, node_id=NodeId("node-1"), stage=Stage(0, 1))
    last = Member(
        worker_id=WorkerId("other"), node_id=NodeId("node-2"), stage=Stage(1, 2), host="h", port=7
    )
    short = msgspec.structs.replace(rig.a_hold(), stage=Stage(0, 1), members=(first, last))
    await rig.command(short)
    await rig.state(HeldState.READY)
    held = await rig.until(lambda: next((one for one in rig.facts.held if one.port), None))
    assert (await rig.submit("req-early")).code == "not_loaded", (
        "its own address was not in the command"
    )
    assert not held.open
    reached = msgspec.structs.replace(
        short, members=(replace(first, host="h", port=held.port), last)
    )
    await rig.command(reached)

    async def accepted() -> bool:
        return (await rig.submit("req-joined")).accepted

    await until(accepted)
    await rig.until(lambda: (now := rig.held()) is not None and now.open)
    return reached


async def test_a_stage_of_a_group_is_joined_when_every_member_can_be_reached(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig()
    await joined(rig)
    assert (await rig.finish_of("req-joined")).finish is FinishReason.LENGTH


async def test_the_death_of_an_engine_of_another_kind_leaves_door_and_channels(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig()
    await joined(rig)
    groups = rig.worker._groups
    assert groups.port
    groups.on_engine_died(frozenset({InstanceId("another")}))
    assert groups.port
    assert groups._joined == {INSTANCE}
    groups.on_engine_died(None)
    assert (groups.port, groups._joined) == (0, set())


async def test_what_lost_its_pipeline_while_it_grew_is_not_joined_again(
    make_rig: MakeRig, leases: Any
) -> None:
    """Not while parts come, and not among members whose ranges overlap: a refusal would be taken
    for one to grow.
    """
    rig = await make_rig()
    reached = await joined(rig)
    groups, (first, last) = rig.worker._groups, reached.members
    leases.gate.clear()
    members = (replace(first, stage=Stage(0, 2)), last)
    await rig.command(msgspec.structs.replace(rig.a_hold(generation=2), members=members))
    await rig.until(lambda: leases.open == 1)
    for generation in (1, 2):
        await rig.until(lambda generation=generation: rig.held().generation == generation)
        groups.on_left(PipelineLeft(instance_id=INSTANCE, code="worker_lost"), None)
        groups.follow(rig.worker.stages.held)
        assert not groups._joined
        leases.gate.set()


async def test_a_stage_serves_nothing_until_it_is_joined_to_the_worker_that_took_one_over(
    make_rig: MakeRig,
) -> None:
    """Also where its engine has not found yet that the pipeline is broken."""
    rig = await make_rig()
    reached = await joined(rig)
    first, last = reached.members
    spare = replace(last, worker_id=WorkerId("spare"), port=0)
    mended = msgspec.structs.replace(
        reached, generation=Generation(2), members=(first, replace(spare, port=0))
    )
    await rig.command(mended)
    await rig.until(lambda: (now := rig.held()) is not None and now.generation == 2)
    assert not rig.held().open
    assert (await rig.submit("req-2")).code == "not_loaded"


async def test_the_same_neighbours_are_looked_for_a_moment_later(make_rig: MakeRig) -> None:
    """Others at once: to look for one that is gone takes long."""
    rig = await make_rig()
    reached = await joined(rig)
    groups, stages = rig.worker._groups, rig.worker.stages
    left = PipelineLeft(instance_id=INSTANCE, code="peer_lost", message="it is gone")
    groups.on_left(left, stages.held[INSTANCE])
    groups.follow(stages.held)
    assert not groups._joined
    await rig.until(lambda: bool(groups._joined))
    groups.on_left(left, stages.held[INSTANCE])
    first, last = reached.members
    spare = replace(last, worker_id=WorkerId("spare"))
    await rig.command(
        msgspec.structs.replace(reached, generation=Generation(2), members=(first, spare))
    )
    await rig.until(lambda: (now := rig.held()) is not None and now.generation == 2)
    groups.follow(stages.held)
    assert groups._joined == {INSTANCE}


async def test_stages_that_remain_take_their_places_in_a_shorter_pipeline(
    make_rig: MakeRig,
) -> None:
    """Each once for a generation, and again where the ring has come to nothing."""
    rig = await make_rig()
    reached = await joined(rig)
    groups, held = rig.worker._groups, rig.worker.stages.held[INSTANCE]
    asked: list[ConnectStage] = []

    async def connect_stage(command: ConnectStage) -> None:
        asked.append(command)

    rig.worker.core.engine.connect_stage = connect_stage
    first, other = reached.members
    stages = (Stage(0, 4), Stage(2, 4), Stage(4, 8), Stage(6, 8))
    members = tuple(
        replace(first if at == 0 else other, worker_id=WorkerId(f"w{at}"), stage=one, port=at + 1)
        for at, one in enumerate(stages)
    )
    held.growing = msgspec.structs.replace(
        reached, generation=Generation(2), stage=stages[0], members=members
    )
    groups.follow([held])
    groups.follow([held])
    await until_asked(asked, 1)
    assert (asked[0].stage, asked[0].behind.stage, asked[0].behind.port) == (*stages[::2], 3)
    assert asked[0].shorter
    groups.on_unformed(INSTANCE)
    groups.follow([held])
    await until_asked(asked, 2)
    # What gives its layers away has no place.
    held.growing = None
    held.hold = msgspec.structs.replace(
        reached, generation=Generation(3), stage=stages[1], members=members
    )
    groups.follow([held])
    # What stays as it is has one.
    stages = (Stage(0, 6), Stage(2, 4), Stage(4, 6), Stage(6, 8))
    members = tuple(replace(one, stage=stage) for one, stage in zip(members, stages, strict=True))
    held.hold = msgspec.structs.replace(held.hold, members=members, stage=stages[3])
    groups.follow([held])
    await until_asked(asked, 3)
    assert (asked[2].stage, asked[2].behind.stage) == (stages[3], Stage(0, 6))


async def until_asked(asked: list[ConnectStage], count: int) -> None:
    async def there() -> bool:
        return len(asked) >= count

    await until(there)
    assert len(asked) == count


async def test_a_stage_whose_growth_fails_serves_on_and_is_tried_again(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig()
    await joined(rig)
    leases.failure = SourceUnavailable("the source says nothing")
    await rig.command(rig.a_hold(generation=2))
    await rig.until(lambda: "says nothing" in rig.held().reason)
    assert (rig.held().state, rig.held().generation) == (HeldState.READY, 1)
    assert (await rig.submit("req-2")).accepted
    leases.failure = None
    await rig.command(rig.a_hold(generation=2))
    await rig.until(lambda: rig.held().generation == 2)
    assert rig.held().reason == ""
    assert (await rig.submit("req-3")).accepted
    assert (await rig.finish_of("req-3")).finish is FinishReason.LENGTH


async def test_a_stage_that_serves_nothing_fails_with_its_growth(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig()
    await rig.command(msgspec.structs.replace(rig.a_hold(), stage=Stage(0, 1)))
    await rig.state(HeldState.READY)
    leases.failure = SourceUnavailable("the source says nothing")
    await rig.command(rig.a_hold(generation=2))
    held = await rig.state(HeldState.FAILED)
    assert held is not None
    assert "says nothing" in held.reason


async def test_a_stage_that_grew_with_parts_that_were_not_whole_fails(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig()
    await rig.command(msgspec.structs.replace(rig.a_hold(), stage=Stage(0, 1)))
    await rig.state(HeldState.READY)
    leases.intact = False
    await rig.command(rig.a_hold(generation=2))
    held = await rig.state(HeldState.FAILED)
    assert held is not None
    assert held.reason.startswith("source_changed")
    assert (await rig.submit()).code == "not_loaded"


async def following(rig: Rig) -> tuple[Hold, Held]:
    """The last one of two joined stages."""
    first = Member(
        worker_id=WorkerId("other"), node_id=NodeId("node-2"), stage=Stage(0, 1), host="h", port=7
    )
    last = Member(
        worker_id=WORKER, node_id=NodeId("node-1"), stage=Stage(1, 2), host="h", port=SIM_PORT
    )
    hold = msgspec.structs.replace(rig.a_hold(), stage=Stage(1, 2), members=(first, last))
    await rig.command(hold)
    await rig.state(HeldState.READY)
    held = rig.worker.stages.held[INSTANCE]
    await until(lambda: held.joined)
    return hold, held


@pytest.mark.parametrize("how", ["left", "dropped", "failed"])
async def test_a_stage_that_follows_drains_when_the_one_that_leads_is_through(
    make_rig: MakeRig, how: str
) -> None:
    """Without it the requests of the one that leads would end; it has none of its own."""
    rig = await make_rig()
    hold, held = await following(rig)
    await rig.command(msgspec.structs.replace(hold, generation=Generation(2), draining=True))
    await rig.state(HeldState.DRAINING)
    rig.worker.stages.on_requests_ended()
    assert held.unloaded is None
    if how == "left":
        rig.worker.stages.on_pipeline_left(PipelineLeft(instance_id=INSTANCE, code="worker_lost"))
    elif how == "failed":
        failed = StageFailed(instance_id=INSTANCE, code="not_loaded", message="it was growing")
        rig.worker.stages.on_load_failed(failed)
    else:
        await rig.command()
    await rig.state(None)


async def test_a_stage_that_has_grown_and_drains_stays_while_another_one_leads(
    make_rig: MakeRig,
) -> None:
    """It has the whole model, and its engine runs its part of that for the one that leads."""
    rig = await make_rig()
    hold, held = await following(rig)
    longer = msgspec.structs.replace(rig.a_hold(generation=2), members=hold.members)
    await rig.command(longer)
    await until(lambda: held.hold.stage == longer.stage)
    held.joined = True  # An engine that simulates leaves its pipeline with that already.
    await rig.command(msgspec.structs.replace(longer, generation=Generation(3), draining=True))
    await rig.state(HeldState.DRAINING)
    rig.worker.stages.on_requests_ended()
    assert held.unloaded is None
    rig.worker.stages.on_pipeline_left(PipelineLeft(instance_id=INSTANCE))
    await rig.state(None)


async def test_a_stage_that_drains_while_it_grows_ends_its_growth(
    make_rig: MakeRig, leases: Any
) -> None:
    """Its engine would take the model over with parts that never come."""
    rig = await make_rig()
    await joined(rig)
    leases.gate.clear()
    longer = rig.a_hold(generation=2)
    await rig.command(longer)
    await rig.until(lambda: leases.open == 1)
    stage = rig.worker.core.engine.main._stages[INSTANCE]
    assert stage.target is not None
    await rig.command(msgspec.structs.replace(longer, generation=Generation(3), draining=True))
    await until(lambda: stage.target is None)
    await rig.state(None)


async def test_requests_of_a_stage_that_fails_while_it_drains_go_on_elsewhere(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig()
    reached = await joined(rig)
    assert (await rig.submit("req-last", max_tokens=10_000)).accepted
    await rig.command(msgspec.structs.replace(reached, generation=Generation(2), draining=True))
    await rig.state(HeldState.DRAINING)
    failed = StageFailed(instance_id=INSTANCE, code="worker_lost", message="its growth is over")
    rig.worker.stages.on_load_failed(failed)
    assert (await rig.finish_of("req-last")).code == "not_loaded"
    await rig.state(None)
