"""The policies of starts that ``PILOTLIGHT_START_POLICY`` names, each in a running scheduler.

With one stage ``paraserve`` and ``pilotlight`` choose alike here; how they differ has tests of the
policies.
"""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from pilotlight.common.db import tables
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.coldstart.policies import StartPolicy
from pilotlight.policy.model import Model, Slo
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import model as a_model
from pilotlight.scheduler.testing import LINK, Fleet, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TAKES = {
    StartPolicy.SINGLE: "n0",
    StartPolicy.LOCALITY: "n1",
    StartPolicy.PARASERVE: "n1",
    StartPolicy.PILOTLIGHT: "n1",
}
"""The first, or the one with a copy."""
WAITS = {
    StartPolicy.SINGLE: False,
    StartPolicy.LOCALITY: False,
    StartPolicy.PARASERVE: True,
    StartPolicy.PILOTLIGHT: True,
}
"""Whether a start waits that would make one late which runs."""


def wanted_in(name: str, ttft_s: float) -> Model:
    return replace(a_model(name), slo=Slo(ttft_ms=1000 * ttft_s, tpot_ms=100_000))


def of(table: dict[StartPolicy, Any]) -> Any:
    return pytest.mark.parametrize(
        ("own_settings", "expected"),
        [({"start_policy": policy}, found) for policy, found in table.items()],
        ids=list(table),
    )


@of(TAKES)
async def test_each_policy_takes_its_node_and_serves(rig: Rig, fleet: Fleet, expected: str) -> None:
    fleet.links = {"n0": LINK, "n1": LINK, "n2": 4 * LINK}
    fleet.copies = {"n1": "a"}
    await rig.register(wanted_in("a", 60.0))
    await fleet.go_on(lambda: fleet.under_way("a"), a=1)
    assert fleet.places() == [expected]
    (row,) = await rig.rows(select(tables.decisions))
    assert row.outcome["scheme"]["pipeline_size"] == 1
    fleet.state = HeldState.READY
    await fleet.go_on(lambda: rig.instances(InstanceState.READY))


@of(WAITS)
async def test_each_policy_heeds_what_runs_or_not(rig: Rig, fleet: Fleet, expected: bool) -> None:
    """One link, and two models each of which is in time only where it fetches alone."""
    fleet.links = {"n0": LINK}
    await rig.register(wanted_in("a", 8.0), wanted_in("b", 8.0))
    await fleet.go_on(lambda: fleet.under_way("a"), a=1)
    for _ in range(4):
        await fleet.later(0.02, a=1, b=1)

    async def decided() -> list[Any]:
        rows = select(tables.decisions).where(tables.decisions.c.model == "b")
        return await rig.rows(rows)

    await fleet.go_on(decided, 0.02, a=1, b=1)
    (row, *_) = await decided()
    assert ("refused" in row.outcome) == expected
    assert bool(fleet.under_way("b")) != expected
