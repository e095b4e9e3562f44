"""The room of a start that several workers share, with the test as the cache."""

from dataclasses import replace

import pytest

from pilotlight.common.errors import NoRoom
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.model import Slo, Stage
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import model as a_model
from pilotlight.scheduler.testing import LINK, Fleet, Rig

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.parametrize("own_settings", [{"max_stages": 2}], ids=["two stages"]),
]
TWO_STAGES_S = 4.5
"""One worker takes 6 s for the bytes, two take 3."""


async def test_stages_ask_together_and_the_worker_that_refused_is_left_out(
    rig: Rig, fleet: Fleet
) -> None:
    """The cache answers when both have asked; what the other stage was granted goes back."""
    fleet.links = {"n0": LINK, "n1": LINK, "n2": LINK}
    rig.full = {WorkerId("w1"): NoRoom("in use")}
    rig.answers_from = 2
    await rig.register(replace(a_model("a"), slo=Slo(ttft_ms=1000 * TWO_STAGES_S, tpot_ms=100_000)))
    await fleet.go_on(lambda: rig.instances(InstanceState.FETCHING), 0.02, a=1)
    asked = [(one.worker_id, one.instance_id) for one in rig.reserved]
    first, second = asked[:2], set(asked[2:])
    assert sorted(worker for worker, _ in first) == ["w0", "w1"]
    assert sorted(worker for worker, _ in second) == ["w0", "w2"]
    granted = [f"grant-{at}" for at, (worker, _) in enumerate(first, 1) if worker == "w0"]
    await rig.until(lambda: rig.released)
    assert rig.released == granted
    (instance,) = rig.instances(InstanceState.FETCHING)
    assert sorted(one.worker_id for one in instance.placements) == ["w0", "w2"]
    assert {one for _, one in second} == {instance.instance_id}
    assert [one.stage for one in instance.placements] == [Stage(0, 2), Stage(2, 4)]
