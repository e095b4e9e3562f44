"""What workers show beside their starts: when it is told, and what learning makes of it."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import NO_LINE, Line, Mean, Point, mean_after
from pilotlight.policy.coldstart.testing import GB, start_model
from pilotlight.policy.coldstart.timings import HopSample, StageSample, Timings, step_bytes
from pilotlight.policy.ids import NodeId
from pilotlight.policy.shown import (
    AGAIN_AFTER_S,
    FIRST_AFTER_S,
    LEAST_STEPS,
    NO_TIMES,
    StageTimes,
    StepsSeen,
)

CUDA = DeviceKind.CUDA
MODEL = start_model()
NODE, OTHER, THIRD = (NodeId(f"n{number}") for number in range(3))
SAMPLE = StageSample(model=MODEL.name, device_kind=CUDA, node_id=NODE)
SOURCE = "s3://models"
SEEDS = st.integers(0, 10**6)
NOISE = 0.2
"""Of a sample, in proportion, either way."""
LEARNED = 60
"""Samples."""
TRUTHS = st.floats(1e-4, 1e3)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def noisy(rng: random.Random, truth: float) -> float:
    return truth * rng.uniform(1 - NOISE, 1 + NOISE)


def decoded(steps: int, step_s: float, seen: StepsSeen) -> StepsSeen:
    for _ in range(steps):
        seen = seen.decoded(2, 100, step_s)
    return seen


def test_means_are_told_once_there_are_enough() -> None:
    seen = decoded(LEAST_STEPS - 1, 0.01, StepsSeen().at(0.0))
    assert seen.at(FIRST_AFTER_S).told == NO_TIMES, "too few"
    seen = decoded(1, 0.01, seen)
    assert seen.at(FIRST_AFTER_S / 2).told == NO_TIMES, "too early"
    told = seen.at(FIRST_AFTER_S).told
    assert told == StageTimes(
        steps=LEAST_STEPS, batch=2, context_tokens=100, step_s=pytest.approx(0.01)
    )


def test_later_ones_are_told_seldom_and_only_when_they_are_news() -> None:
    """A report that is other than the last one costs everybody that listens."""
    seen = decoded(LEAST_STEPS, 0.01, StepsSeen().at(0.0)).at(FIRST_AFTER_S)
    first = seen.told
    slower = decoded(LEAST_STEPS, 0.02, seen)
    assert slower.at(FIRST_AFTER_S + AGAIN_AFTER_S / 2).told == first
    assert slower.at(FIRST_AFTER_S + AGAIN_AFTER_S).told.step_s == pytest.approx(0.02)
    alike = decoded(2 * LEAST_STEPS, 0.0105, seen)
    assert alike.at(FIRST_AFTER_S + AGAIN_AFTER_S).told is first


def test_hops_are_told_as_steps_are() -> None:
    seen = StepsSeen().at(0.0)
    for _ in range(LEAST_STEPS):
        seen = seen.hopped(0.003)
    told = seen.at(FIRST_AFTER_S).told
    assert (told.hops, told.steps) == (LEAST_STEPS, 0)
    assert told.hop_s == pytest.approx(0.003)


@given(SEEDS, TRUTHS, TRUTHS)
def test_times_of_starts_come_to_the_truth(seed: int, before: float, truth: float) -> None:
    """Also after the truth was another one: five samples forget it, ``LEARNED`` do for certain."""
    rng, timings = random.Random(seed), Timings()
    for real in (before, truth):
        timings = timings.learned(
            replace(
                SAMPLE,
                create_s=noisy(rng, real),
                context_s=noisy(rng, 2 * real),
                libraries_s=noisy(rng, 3 * real),
                init_s=noisy(rng, 4 * real),
            )
            for _ in range(LEARNED)
        )
    near = pytest.approx
    times = timings.start_times(NODE, CUDA)
    assert times.create_s == near(truth, rel=NOISE)
    assert times.context_s == near(2 * truth, rel=NOISE)
    assert times.libraries_s == near(3 * truth, rel=NOISE)
    assert timings.init_s(MODEL.name, CUDA) == near(4 * truth, rel=NOISE)
    assert timings.start_times(OTHER, CUDA).create_s == near(truth, rel=NOISE), "as elsewhere"


@given(SEEDS, st.floats(0.001, 0.1), st.floats(500, 5000))
def test_decode_comes_to_the_line_that_devices_follow(
    seed: int, launch_s: float, gb_per_s: float
) -> None:
    """Batches and contexts as they come; asked for within what was seen."""
    rng, timings = random.Random(seed), Timings()

    def real_s(read_bytes: int) -> float:
        return launch_s + read_bytes / gb_per_s / GB

    for _ in range(LEARNED):
        read_bytes = step_bytes(MODEL, 1, rng.randint(0, 400_000))
        point = Point(float(read_bytes), noisy(rng, real_s(read_bytes)))
        timings = timings.learned([replace(SAMPLE, decode=point)])
    found_s = timings.decode_s(MODEL, CUDA, 4000.0 * GB, 64, 3000)
    assert found_s == pytest.approx(real_s(step_bytes(MODEL, 64, 3000)), rel=2 * NOISE)


@given(SEEDS, st.floats(1e-5, 0.1), st.floats(1e-5, 0.1))
def test_hops_come_to_the_truth_of_each_pair(seed: int, near_s: float, far_s: float) -> None:
    rng = random.Random(seed)
    pairs = {(NODE, OTHER): near_s, (OTHER, THIRD): far_s}
    timings = Timings().learned(
        hops=[
            HopSample(first=first, second=second, hop_s=noisy(rng, truth))
            for _ in range(LEARNED)
            for (first, second), truth in pairs.items()
        ]
    )
    for (first, second), truth in pairs.items():
        assert timings.hop_s(second, first) == pytest.approx(truth, rel=NOISE)
        assert timings.ring_hop_s((first, second)) == timings.hop_s(first, second)
    low, high = sorted((near_s, far_s))
    assert (1 - NOISE) * low <= timings.ring_hop_s(()) <= (1 + NOISE) * high


@given(SEEDS, st.floats(1e6, 1e10), st.floats(2.0, 1000.0))
def test_a_node_that_lies_about_its_bandwidth_is_corrected(
    seed: int, real: float, factor: float
) -> None:
    rng, link = random.Random(seed), real * factor
    timings = Timings()
    assert timings.fetch_bytes_per_s(NODE, SOURCE, link) == link, "believed, before the first start"
    for count in range(1, 6):
        sample = replace(SAMPLE, source=SOURCE, fetch_bytes_per_s=noisy(rng, real))
        timings = timings.learned([sample])
        found = timings.fetch_bytes_per_s(NODE, SOURCE, link)
        assert found == pytest.approx(real, rel=NOISE), f"after {count} starts"
        assert timings.fetch_bytes_per_s(NODE, "s3://other", link) <= real * (1 + NOISE)
    if factor > 2 * math.sqrt(2) * (1 + NOISE):
        assert timings.slowness(NODE, link) > 0
    honest = replace(SAMPLE, node_id=OTHER, source=SOURCE, fetch_bytes_per_s=link)
    if factor > 30:  # What all have got of the source is between the two for long.
        assert timings.learned([honest] * 9).lags(NODE, SOURCE)


@given(st.lists(NUMBERS, max_size=20))
def test_no_sample_makes_a_mean_that_is_no_number(samples: list[float]) -> None:
    known: Mean | None = None
    for sample in samples:
        known = mean_after(known, sample)
    good = [one for one in samples if 0 <= one < math.inf]
    assert (known is None) == (not good)
    if known is not None:
        assert 0 <= known.value <= max(good)
        assert known.spread >= 0


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS) | st.tuples(st.floats(1, 1e15), st.floats(0, 1e6))),
    st.floats(1, 1e13),
)
def test_no_sample_makes_a_line_that_is_no_number(
    samples: list[tuple[float, float]], x: float
) -> None:
    line: Line = NO_LINE
    for sample in samples:
        size, took_s = sample
        if 1e15 < size < math.inf or 1e9 < took_s < math.inf:
            continue  # More than any device reads in a step, and than anybody waits for.
        line = line.after(Point(*sample))
    found = line.at(x, (Point(1e9, 0.01), Point(2e9, 0.02)))
    assert 0 <= found < math.inf
