"""A stage of a group that becomes the whole model: its graphs come back in place, when the stage
has memory for all layers.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from restored_rig import DEADLINE_S, RestoredRig, settled

from pilotlight.engine.cuda.graphs import Kind
from pilotlight.policy.model import Stage

HALF = Stage(0, 2)


@pytest.fixture
def rig() -> Iterator[RestoredRig]:
    made = RestoredRig(later=True)
    made.steps.present = False
    yield made
    made.end()


def extended(rig: RestoredRig, *, whole: bool) -> None:
    rig.steps.present = whole
    assert rig.plan is not None
    rig.plan.extended()


def test_nothing_is_made_before_the_stage_is_whole(rig: RestoredRig) -> None:
    rig.device.go()
    plan = rig.begin()
    assert rig.supply(4, HALF) is None
    assert rig.capture.asked == [Kind(HALF, 4)], "steps of its range are captured"
    extended(rig, whole=False)
    assert plan.expect(100) is False
    assert (plan.news.ready, plan.news.refused) == (0, "")
    assert not rig.device.began[1].is_set()
    assert rig.device.loaded == rig.device.checked == []


def test_graphs_come_in_place_when_the_stage_is_whole(rig: RestoredRig) -> None:
    plan = rig.begin()
    rig.device.go()
    extended(rig, whole=True)
    settled(rig)
    assert rig.device.built == [1, 2, 4]
    assert rig.device.checked == [1, 2, 4], "what has memory is looked at when it is whole"
    step = rig.supply(2)
    assert step is not None
    step.graph.replay()
    assert (plan.news.ready, plan.news.proved) == (3, 1)
    assert rig.capture.asked == []
    extended(rig, whole=True)
    assert rig.device.built == [1, 2, 4], "once"


def test_a_growth_that_is_called_off_and_comes_again_changes_nothing(rig: RestoredRig) -> None:
    rig.begin()
    extended(rig, whole=True)
    assert rig.device.began[1].wait(DEADLINE_S)
    rig.steps.present = False  # retracted
    assert rig.supply(4, HALF) is None
    rig.device.go()
    settled(rig)
    extended(rig, whole=True)
    assert rig.supply(4) is not None
    assert rig.device.built == [1, 2, 4]


def test_a_stage_that_goes_before_it_is_whole_ends_the_thread(rig: RestoredRig) -> None:
    plan = rig.begin()
    assert rig.plan is not None
    plan.close()
    settled(rig)
    assert rig.device.built == []


@pytest.mark.parametrize("field", ["slot", "metadata"])
def test_what_does_not_fit_is_refused_before_the_stage_is_whole(
    rig: RestoredRig, field: str
) -> None:
    if field == "slot":
        rig.slot += 1
    else:
        places = tuple(replace(one, address=one.address + 8) for one in rig.layout.places)
        rig.layout = replace(rig.layout, places=places)
    plan = rig.begin()
    extended(rig, whole=True)
    assert plan.news.refused in (field, "logits")
    assert rig.supply(4) is None
    assert rig.capture.asked == [rig.steps.kind_of(4)]


def test_a_range_that_stays_one_is_refused_by_name() -> None:
    rig = RestoredRig()
    rig.steps.present = False
    assert rig.begin().news.refused == "steps"
    rig.end()
