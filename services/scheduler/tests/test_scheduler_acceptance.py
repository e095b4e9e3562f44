"""What a cluster must never do to its users: starts that make each other late, bursts, what cannot
be, a node that lies, a clock that jumps.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.service import Application
from pilotlight.common.testing import until
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.model import Model, Slo
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import model as a_model
from pilotlight.scheduler.testing import DEADLINE_S, LINK, Fleet, Rig, first_token

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState


def hurried(name: str, ttft_s: float = 8.0, **bounds: float) -> Model:
    """In time where it fetches alone, late where it shares a link with another from the start."""
    return replace(a_model(name, **bounds), slo=Slo(ttft_ms=1000 * ttft_s, tpot_ms=100_000))


async def decisions(rig: Rig, name: str) -> list[Any]:
    rows = select(tables.decisions).where(tables.decisions.c.model == name)
    return await rig.rows(rows.order_by(tables.decisions.c.at))


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


async def test_the_next_leader_refuses_what_would_make_a_running_fetch_late(
    rig: Rig, fleet: Fleet, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    """It has the books of the leader before it, from the placements that were written down."""
    fleet.links = {"n0": LINK}
    # Four of the ten seconds may pass until the next one leads.
    await rig.register(hurried("a", 10.0), hurried("b", 10.0))
    await fleet.go_on(lambda: fleet.under_way("a"), a=1)
    await new_scheduler(rig.clock)
    epoch = rig.epoch
    for component in reversed(rig.application.components):
        await component.stop()

    async def taken() -> bool:
        rows = await rig.rows(select(tables.lease.c.epoch))
        return bool(rows) and rows[0].epoch > epoch

    await until(taken, deadline_s=DEADLINE_S)
    await fleet.go_on(lambda: rig.epoch > epoch, 0.3, a=1)

    async def decided() -> list[Any]:
        return await decisions(rig, "b")

    await fleet.go_on(decided, 0.02, a=1, b=1)
    refused = (await decided())[0]
    assert "what runs there would be late" in " ".join(refused.reasons)
    assert refused.epoch == rig.epoch
    assert not fleet.under_way("b")
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
    # Not for so long that what waits were forgotten, should the leader hear of the last one alone.
    for _ in range(6):
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
    told = await rig.until(
        lambda: [one for one in rig.events if one.kind == "start_misses_slo"], DEADLINE_S
    )
    assert [(one.data["model"], one.data["decision_id"]) for one in told] == [
        ("a", decision.decision_id)
    ]
    assert told[0].data["predicted_ttft_s"] > told[0].data["slo_ttft_s"] == 0.001


@pytest.mark.parametrize("names", [("n0", "n1"), ("n1", "n0")], ids=["second", "first"])
async def test_a_node_that_lies_about_its_link_is_left_after_one_start(
    rig: Rig, fleet: Fleet, names: tuple[str, str]
) -> None:
    """Also where its worker comes before those that promise no more than it gave."""
    speeds = {"n0": LINK, "n1": 4 * LINK}
    fleet.links = {name: speeds[name] for name in names}
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
