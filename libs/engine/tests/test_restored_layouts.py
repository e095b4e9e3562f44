"""Layouts of restored graphs, whatever is in them: refused by name before the driver hears of them,
or what was recorded.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restored_rig import POOL_BYTES, WHOLE, RestoredRig

from pilotlight.engine.cuda.graphs import SIZES, Kind
from pilotlight.engine.errors import RestoreFailed
from pilotlight.policy.materialized import GraphPlace, Trial

ZEROS = "0" * 64
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no trials": ({"trials": ()}, "trials"),
    "a size that no step has": ({"trials": (Trial(rows=3, digest=ZEROS),)}, "trials"),
    "no rows": ({"trials": (Trial(rows=0, digest=ZEROS),)}, "trials"),
    "a size twice": ({"trials": (Trial(rows=2, digest=ZEROS),) * 2}, "trials"),
    "falling": ({"trials": tuple(Trial(rows=n, digest=ZEROS) for n in (2, 1))}, "trials"),
    "no digest": ({"trials": (Trial(rows=2, digest="0"),)}, "trials"),
    "a place without a name": ({"places": (GraphPlace(name="", address=1),)}, "places"),
    "no pool": ({"pool_bytes": 0}, "pool"),
    "less than no pool": ({"pool_bytes": -POOL_BYTES}, "pool"),
    "a pool beyond all addresses": ({"pool_bytes": 1 << 60}, "pool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layout_that_no_recorder_made_is_refused_by_name(name: str) -> None:
    changes, field = WRONG[name]
    rig = RestoredRig()
    rig.layout = replace(rig.layout, **changes)
    plan = rig.begin()
    assert rig.supply(2) is None
    assert rig.capture.asked == [Kind(WHOLE, 2)]
    assert plan.news.refused == field
    assert rig.device.built == []
    rig.end()


def test_a_size_between_recorded_ones_is_captured() -> None:
    """It is no step of the next larger one."""
    rig = RestoredRig((1, 8))
    rig.begin()
    rig.device.go()
    assert rig.supply(8) is not None
    assert rig.supply(4) is None
    assert rig.capture.asked == [Kind(WHOLE, 4)]
    rig.end()


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 300)
TRIALS = st.builds(Trial, rows=NUMBERS | st.sampled_from(SIZES), digest=st.text(max_size=70))
PLACES = st.builds(GraphPlace, name=st.text(max_size=9), address=NUMBERS)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_a_layout_says_a_step_runs_or_the_restore_failed(data: st.DataObject) -> None:
    rig = RestoredRig(wait_s=0.05)
    whole = rig.layout
    rig.layout = replace(
        whole,
        slot=data.draw(st.just(whole.slot) | NUMBERS),
        places=data.draw(st.just(whole.places) | st.lists(PLACES, max_size=3).map(tuple)),
        pool_bytes=data.draw(st.just(whole.pool_bytes) | NUMBERS),
        trials=data.draw(
            st.just(whole.trials)
            | st.lists(st.sampled_from(whole.trials) | TRIALS, max_size=4).map(tuple)
        ),
    )
    rig.device.go()
    plan = rig.begin()
    for rows in (1, 2, 4, 8):
        with suppress(RestoreFailed):  # a trial's digest is another
            rig.supply(rows)
    if plan.news.refused:
        assert rig.device.built == []
    else:
        assert rig.layout.differs(rig.slot, whole.addresses) is None
        # What the archive has beside is a later release's.
        assert {trial.rows for trial in rig.layout.trials} <= {1, 2, 4}
    rig.end()
