"""One cost model: what a simulated engine takes is what a decision predicts."""

from dataclasses import replace

import pytest

from pilotlight.policy.cost import (
    EngineSpeed,
    may_be_whole,
    part_load_s,
    stage_cost,
    stage_room,
    step_s,
)
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.testing import model, node, worker


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("stage", [Stage(0, 4), Stage(0, 2), Stage(2, 4)])
def test_the_parts_of_a_stage_take_as_long_as_is_predicted_for_the_stage(
    dtype: Dtype, stage: Stage
) -> None:
    """In the dtype that the engine runs in: twice the bytes of a checkpoint that has half of it."""
    one, device = replace(model(), dtype=dtype), worker(0).device
    spec = one.spec
    each_s = [part_load_s(one, part, device.load_bytes_per_s) for part in spec.parts_of(stage)]
    assert sum(each_s) == pytest.approx(stage_cost(one, stage, worker(0), node(), None).load_s)
    assert (
        each_s[0]
        == spec.part_bytes[0] * (2 if dtype is Dtype.FLOAT32 else 1) / device.load_bytes_per_s
    )


def test_a_step_costs_its_prompts_beside_what_every_step_costs() -> None:
    speed = EngineSpeed(load_bytes_per_s=1.0, prefill_tokens_per_s=1000.0, decode_step_s=0.25)
    assert (step_s(speed, 0), step_s(speed, 500)) == (0.25, 0.75)


def test_a_stage_with_the_room_of_the_whole_model_may_be_that() -> None:
    one, stage = model(), Stage(0, 2)
    whole, part = stage_room(one, one.spec.whole), stage_room(one, stage)
    assert may_be_whole(one, stage, whole.least_bytes)
    assert not may_be_whole(one, stage, part.least_bytes), "a low-memory worker's"
    assert not may_be_whole(one, stage, whole.least_bytes - 1), "the whole has no room in that"
    assert not may_be_whole(one, one.spec.whole, whole.usual_bytes), "it is that already"
