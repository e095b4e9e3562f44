"""What a hop between two stages takes, as the stage that leads finds it out."""

import random

import pytest
from pipelines import connect, cuts

from pilotlight.common.clock import ManualClock
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.engine import Engine
from pilotlight.engine.pipeline import lead
from pilotlight.engine.resident import ResidentStage

HOP_S, COMPUTED_S = 0.01, 0.1


@pytest.fixture
def timed(monkeypatch):
    """Time passes while layers run, and while nothing does."""
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)
    clock, run = ManualClock(), ResidentStage.run

    def run_slowly(*of):
        clock.advance(COMPUTED_S)
        return run(*of)

    monkeypatch.setattr(ResidentStage, "run", run_slowly)
    return clock


def joined(driver, clock, checkpoint, num_stages):
    model = checkpoint("llama-tied", 1)
    drivers = []
    for stage in cuts(4, num_stages):
        made = driver(BatchLimits(step_tokens=24, running=24))
        made.engine = Engine(1, clock.monotonic_s, made.engine._limits, made.engine.arena)
        made.load(model, stage=stage)
        drivers.append(made)
    return connect(drivers, random.Random(0))


def rounds(pipeline, clock, count):
    """Each stage in its turn, a hop after the one before."""
    found = []
    for _ in range(count):
        for driver in pipeline.drivers:
            clock.advance(HOP_S)
            if driver.engine.has_work:
                found.append(driver.step().hop_s)
    return [one for one in found if one > 0]


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_hop_is_what_a_round_takes_without_what_stages_compute(
    num_stages, driver, timed, checkpoint, prompts
):
    pipeline = joined(driver, timed, checkpoint, num_stages)
    pipeline.lead.add("0", prompts[0][:8], max_tokens=12)
    hops = rounds(pipeline, timed, 60)
    assert len(hops) == 12
    assert hops == pytest.approx([HOP_S] * 12)


def test_what_goes_round_behind_others_says_nothing(driver, timed, checkpoint, prompts):
    """It waits where they compute."""
    pipeline = joined(driver, timed, checkpoint, 2)
    for name in "01":
        pipeline.lead.add(name, prompts[0][:8], max_tokens=12)
    hops = rounds(pipeline, timed, 60)
    assert len(hops) < 4
    assert all(one < COMPUTED_S for one in hops)
