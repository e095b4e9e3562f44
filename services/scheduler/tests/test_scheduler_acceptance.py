"""What a cluster must never do to its users: starts that make each other late, bursts, what cannot
be, a node that lies, a clock that jumps.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import select

from pilotlight.common.db import tables
from pilotlight.common.messages.demand import DemandVector, demand_subject
from pilotlight.common.messages.hold import WorkerHold
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.testing import until
from pilotlight.policy.cluster import HeldStage, HeldState
from pilotlight.policy.ids import NodeId, RequestId, WorkerId
from pilotlight.policy.instance import SERVING
from pilotlight.policy.model import Model, Slo
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import model as a_model
from pilotlight.policy.testing import node, worker
from pilotlight.scheduler.testing import DEADLINE_S, GATEWAY, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
LINK = 10.0
"""Bytes a second: a model of 60 bytes takes 6 s over it."""
IDLE_S = 1.0
"""What workers say of stages while nothing waits."""


@dataclass
class Fleet:
    """Nodes with a worker each, which hold what they are told to hold."""

    rig: Rig
    links: Mapping[str, float]
    """What each node says of its link, in bytes a second."""
    told: dict[WorkerId, WorkerHold] = field(default_factory=dict[WorkerId, WorkerHold])
    state: HeldState = HeldState.LOADING

    async def on_hold(self, hold: WorkerHold) -> None:
        """A worker's command."""
        self.told[hold.worker_id] = hold

    async def later(self, seconds: float = 0.1, **waiting: int) -> None:
        """Let time pass; workers obey and report, the gateway says what waits."""
        self.rig.clock.advance(seconds)
        for at, (name, link) in enumerate(self.links.items()):
            worker_id = WorkerId(f"w{at}")
            told = self.told.get(worker_id)
            stages = tuple(
                HeldStage(
                    instance_id=one.instance_id,
                    generation=one.generation,
                    model=one.model.name,
                    digest=one.model.digest,
                    stage=one.stage,
                    state=self.state,
                    device_bytes=one.device_bytes,
                    idle_s=0.0 if waiting else IDLE_S,
                )
                for one in (told.holds if told is not None else ())
                if not one.draining
            )
            epoch = told.epoch if told is not None else self.rig.epoch
            facts = replace(worker(at, held_stages=stages), node_id=NodeId(name))
            report = WorkerReport(facts=facts, incarnation="a", epoch_seen=epoch)
            await self.rig.bus.publish(worker_report_subject(worker_id), report)
            here = replace(node(), node_id=NodeId(name), host=name, nic_bytes_per_s=link)
            loader = LoaderReport(facts=here, incarnation="l", epoch_seen=epoch)
            await self.rig.bus.publish(loader_report_subject(NodeId(name)), loader)
        demands = tuple(
            Demand(model=name, waiting=many, oldest_age_s=0.1, deadline_in_s=60.0)
            for name, many in waiting.items()
        )
        vector = DemandVector(gateway_id=GATEWAY, demands=demands)
        await self.rig.bus.publish(demand_subject(GATEWAY), vector)

    async def go_on(self, condition: Any, seconds: float = 0.1, **waiting: int) -> None:
        """Let time pass, with requests that wait, until a condition holds."""
        await self.rig.passing(lambda: self.later(seconds, **waiting), condition)

    def under_way(self, *models: str) -> list[Instance]:
        """Instances that start or serve."""
        found = self.rig.instances(S.FETCHING, S.LOADING, *SERVING)
        return [one for one in found if not models or one.model in models]

    def places(self) -> list[str]:
        """Nodes of the instances that start or serve."""
        return sorted(one.placements[0].node_id for one in self.under_way())


@pytest.fixture
async def fleet(rig: Rig) -> AsyncGenerator[Fleet]:
    fleet = Fleet(rig, {"n0": LINK, "n1": LINK, "n2": LINK, "n3": LINK})
    subscription = await rig.bus.subscribe("v1.worker.*.hold", WorkerHold, fleet.on_hold)
    yield fleet
    await subscription.end()


def hurried(name: str, ttft_s: float = 8.0, **bounds: float) -> Model:
    """In time where it fetches alone, late where it shares a link with another from the start."""
    return replace(a_model(name, **bounds), slo=Slo(ttft_ms=1000 * ttft_s, tpot_ms=100_000))


async def decisions(rig: Rig, name: str) -> list[Any]:
    rows = select(tables.decisions).where(tables.decisions.c.model == name)
    return await rig.rows(rows.order_by(tables.decisions.c.at))


async def first_token(rig: Rig, instance: Instance, fetch_s: float) -> None:
    """Its fetch and its first token are reported."""
    now_s = rig.clock.monotonic_s()
    offset_s = rig.clock.wall().timestamp() - now_s
    fetch = Phase(
        name=PhaseName.FETCH,
        start_s=now_s,
        end_s=now_s + fetch_s,
        wall_offset_s=offset_s,
        process="loader",
    )
    first = FirstToken(
        request_id=RequestId("r"),
        at_s=now_s + fetch_s,
        wall_offset_s=offset_s,
        arrived_s=now_s,
    )
    report = PhaseReport(instance_id=instance.instance_id, phases=(fetch,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=DEADLINE_S)


async def test_starts_that_would_make_each_other_late_go_apart(rig: Rig, fleet: Fleet) -> None:
    await rig.register(hurried("a"), hurried("b"))
    await fleet.go_on(lambda: len(fleet.under_way()) == 2, a=1, b=1)
    assert len(set(fleet.places())) == 2
    for name in "ab":
        (decision,) = await decisions(rig, name)
        assert decision.outcome["meets_slo"]


async def test_with_one_node_the_second_waits_and_the_first_keeps_its_slo(
    rig: Rig, fleet: Fleet
) -> None:
    fleet.links = {"n0": LINK}
    await rig.register(hurried("a"), hurried("b"))
    await fleet.go_on(lambda: fleet.under_way("a"), a=1)
    for _ in range(4):
        await fleet.later(0.02, a=1, b=1)
    assert not fleet.under_way("b")
    (first,) = await decisions(rig, "a")
    assert first.outcome["meets_slo"]
    await until(lambda: decisions(rig, "b"))
    refused = (await decisions(rig, "b"))[0]
    assert "what runs there would be late" in " ".join(refused.reasons)
    fleet.state = HeldState.READY
    await fleet.go_on(lambda: fleet.under_way("b"), b=1)


async def test_a_burst_gets_what_it_needs_and_all_of_it_goes_again(rig: Rig, fleet: Fleet) -> None:
    """One instance for every sixteen requests."""
    await rig.register(a_model(keep_alive_s=0.5, max_instances=4))
    await fleet.go_on(lambda: len(fleet.under_way()) == 3, m=48)
    fleet.state = HeldState.READY
    await fleet.go_on(lambda: len(rig.instances(S.READY)) == 3, m=48)
    for _ in range(4):
        await fleet.later(m=48)
    assert len(fleet.under_way()) == 3, "and no more"
    assert len(set(fleet.places())) == 3
    await fleet.go_on(lambda: not fleet.under_way(), 0.4)
    for _ in range(4):
        await fleet.later(0.4)
    assert not fleet.under_way(), "and none comes back"


async def test_a_model_larger_than_the_cluster_is_refused_once_and_starves_nobody(
    rig: Rig, fleet: Fleet
) -> None:
    await rig.register(a_model("huge", part_bytes=1000), a_model("m"))
    await fleet.go_on(lambda: fleet.under_way("m"), huge=1, m=1)
    fleet.state = HeldState.READY
    for _ in range(12):
        await fleet.later(0.3, huge=1)
    assert not fleet.under_way("huge")

    async def written() -> bool:
        return bool(await decisions(rig, "huge"))

    await until(written)
    rows = await decisions(rig, "huge")
    assert [row.outcome["refused"] for row in rows] == ["no_worker"]
    assert "more than any worker has" in rows[0].outcome["message"]


async def test_a_slo_that_nothing_can_meet_gets_one_start_the_best_there_is(
    rig: Rig, fleet: Fleet
) -> None:
    fleet.links = {"n0": LINK, "n1": 4 * LINK}
    await rig.register(hurried("a", ttft_s=0.001))
    await fleet.go_on(lambda: fleet.under_way(), a=1)
    fleet.state = HeldState.READY
    for _ in range(6):
        await fleet.later(0.3, a=1)
    assert fleet.places() == ["n1"]
    (decision,) = await decisions(rig, "a")
    assert not decision.outcome["meets_slo"]


async def test_a_node_that_lies_about_its_link_is_left_after_one_start(
    rig: Rig, fleet: Fleet
) -> None:
    fleet.links = {"n0": LINK, "n1": 4 * LINK}
    await rig.register(a_model("a"), a_model("b"))
    await fleet.go_on(lambda: fleet.under_way("a"), a=1)
    assert fleet.places() == ["n1"]
    fleet.state = HeldState.READY
    await fleet.go_on(lambda: rig.instances(S.READY), a=1)
    await first_token(rig, rig.instances(S.READY)[0], fetch_s=30.0)

    async def learned() -> bool:
        rows = await rig.rows(select(tables.timings.c.key))
        return '["rate","n1","file://"]' in [row.key for row in rows]

    for _ in range(24):
        await fleet.later(0.45)
    await until(learned)
    await fleet.go_on(lambda: fleet.under_way("b"), b=1)
    assert fleet.under_way("b")[0].placements[0].node_id == "n0"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_clock_that_jumps_ends_nothing_and_starts_go_on(
    rig: Rig, fleet: Fleet, jump_s: float
) -> None:
    """The clock of the day is set; the other one, by which control decides, goes on."""
    await rig.register(a_model("a"), a_model("b"))
    await fleet.go_on(lambda: fleet.under_way("a"), a=1)
    fleet.state = HeldState.READY
    await fleet.go_on(lambda: rig.instances(S.READY))
    epoch = rig.instances(S.READY)[0].epoch
    rig.clock.set_wall(jump_s)
    await fleet.go_on(lambda: fleet.under_way("b"), b=1)
    await fleet.go_on(lambda: len(rig.instances(S.READY)) == 2, b=1)
    (second,) = [one for one in rig.instances(S.READY) if one.model == "b"]
    await first_token(rig, second, fetch_s=1.0)
    cold = select(tables.cold_starts).where(tables.cold_starts.c.model == "b")
    (record,) = await rig.rows(cold)
    assert (record.status, record.ttft_s) == ("done", pytest.approx(1.0))
    assert {one.epoch for one in rig.instances(S.READY)} == {epoch}
    assert S.FAILED not in {state for _, state in rig.states}
