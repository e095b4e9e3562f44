"""What is learned of starts, and what is believed before the first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import NO_LINE, Line, Mean, Point, mean_after
from pilotlight.policy.coldstart.testing import GB, start_model
from pilotlight.policy.coldstart.timings import (
    SEED_STARTS,
    UNTRIED,
    HopSample,
    Probe,
    StageSample,
    Timings,
    prompt_operations,
    step_bytes,
)
from pilotlight.policy.cost import HOP_S
from pilotlight.policy.ids import ModelName, NodeId
from pilotlight.policy.model import Stage

MODEL = start_model()
NODE, OTHER = NodeId("n0"), NodeId("n1")
CUDA = DeviceKind.CUDA
SAMPLE = StageSample(model=MODEL.name, device_kind=CUDA, node_id=NODE)
PRIOR = (Point(1.0, 1.0), Point(100.0, 2.0))


def test_a_node_that_gets_less_than_others_lags() -> None:
    """Not where all of them get little: then it is the source."""
    timings = Timings()
    for node_id, rate in (("n1", 8.0), ("n2", 8.0), ("n3", 1.0)):
        sample = StageSample(
            model=ModelName("m"),
            device_kind=DeviceKind.CPU,
            node_id=NodeId(node_id),
            source="s3://there",
            fetch_bytes_per_s=rate,
        )
        timings = timings.learned((sample,))
    assert [timings.lags(NodeId(one), "s3://there") for one in ("n1", "n2", "n3", "n4")] == [
        False,
        False,
        True,
        False,
    ]
    assert timings.slowness(NodeId("n3"), 8.0) == 3
    assert timings.slowness(NodeId("n1"), 8.0) == 0


def test_a_mean_forgets_and_says_how_far_samples_lie() -> None:
    mean = mean_after(None, 10.0)
    assert mean == Mean(10.0, 5.0, 1)
    assert mean.after(20.0) == Mean(13.0, 6.5, 2)
    assert mean_after(mean, None) is mean
    assert mean_after(mean, -1.0) is mean


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_a_mean_lies_among_its_samples(samples: list[float]) -> None:
    mean = None
    for sample in samples:
        mean = mean_after(mean, sample)
    assert mean is not None
    assert min(samples) - 1e-6 <= mean.value <= max(samples) + 1e-6
    assert 0 <= mean.spread <= max(samples) + 1e-6
    assert mean.samples == len(samples)


def test_what_is_far_better_begins_anew() -> None:
    """A start that compiles takes seconds, and the next one milliseconds."""
    slow = mean_after(mean_after(None, 5.0), 5.0)
    assert mean_after(slow, 0.05) == Mean(0.05, 0.025, 3)
    assert mean_after(slow, 2.0) == Mean(5.0, 1.75, 2).after(2.0)
    assert mean_after(slow, 0.0) == Mean(5.0, 1.75, 2).after(0.0), "it shows nothing"
    after_worse = mean_after(mean_after(slow, 0.05), 5.0)
    assert after_worse is not None
    assert after_worse.value == pytest.approx(0.7 * 0.05 + 0.3 * 5.0)
    assert mean_after(Mean(1.0, 0.5), 50.0, of_rates=True) == Mean(50.0, 25.0, 2)
    line = NO_LINE.after(Point(160.0, 5.0)).after(Point(160.0, 4.0))
    assert line.after(Point(161.0, 0.05)).at(161.0, PRIOR) < 0.5
    assert line.after(Point(16.0, 0.05)).at(160.0, PRIOR) > 2.0, "a short prompt says less"


def test_equal_samples_have_no_spread_in_the_end() -> None:
    mean = mean_after(None, 4.0)
    for _ in range(40):
        mean = mean_after(mean, 4.0)
    assert mean is not None
    assert mean.value == pytest.approx(4.0)
    assert mean.spread < 1e-5


def test_a_line_without_samples_is_its_prior() -> None:
    assert NO_LINE.at(1, PRIOR) == pytest.approx(1.0)
    assert NO_LINE.at(100, PRIOR) == pytest.approx(2.0)


@given(st.floats(0, 10), st.floats(0, 0.1))
def test_a_line_finds_the_line_of_its_samples(intercept: float, slope: float) -> None:
    line = Line()
    for x in (10, 500, 40, 1000, 300, 900, 20, 600) * 4:
        line = line.after(Point(x, intercept + slope * x))
    for x in (50, 1000):
        assert line.at(x, PRIOR) == pytest.approx(intercept + slope * x, rel=0.15, abs=0.3)


def test_samples_at_one_place_leave_the_slope_to_the_prior() -> None:
    line = Line()
    for _ in range(30):
        line = line.after(Point(100.0, 4.0))
    assert line.at(100, PRIOR) == pytest.approx(4.0, rel=0.05)
    assert line.at(200, PRIOR) >= line.at(100, PRIOR)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 100)), max_size=20), st.floats(0, 1e5))
def test_a_line_never_says_less_than_nothing(samples: list[tuple[float, float]], x: float) -> None:
    line = Line()
    for at, value in samples:
        line = line.after(Point(at, value))
    assert line.at(x, PRIOR) >= 0
    assert line.at(x + 1, PRIOR) >= line.at(x, PRIOR) - 1e-9


def test_nothing_learned_changes_what_was_there() -> None:
    before = Timings()
    after = before.learned([replace(SAMPLE, libraries_s=9.0)])
    assert before == Timings()
    assert after.start_times(NODE, CUDA).libraries_s == 9.0


def test_starts_by_node_then_by_kind_then_by_seed() -> None:
    timings = Timings()
    assert timings.start_times(NODE, CUDA) == SEED_STARTS[CUDA]
    timings = timings.learned([replace(SAMPLE, libraries_s=9.0, context_s=0.2)])
    assert timings.start_times(OTHER, CUDA).libraries_s == 9.0
    assert timings.start_times(OTHER, DeviceKind.CPU) == SEED_STARTS[DeviceKind.CPU]
    timings = timings.learned([replace(SAMPLE, node_id=OTHER, libraries_s=1.0)])
    assert timings.start_times(OTHER, CUDA).libraries_s == 1.0
    assert timings.start_times(NODE, CUDA).libraries_s == 9.0
    assert timings.start_times(NODE, CUDA).before_load_s == pytest.approx(
        0.2 + SEED_STARTS[CUDA].create_s
    )


def test_bandwidth_by_node_and_source() -> None:
    """A source that is slow at one node is believed to be slow at others, if a little less: they
    are tried next. Another source is not.
    """
    timings = Timings()
    assert timings.fetch_bytes_per_s(NODE, "s3://a", 9.0) == 9.0
    timings = timings.learned([replace(SAMPLE, source="s3://a", fetch_bytes_per_s=2.0)])
    assert timings.fetch_bytes_per_s(NODE, "s3://a", 9.0) == 2.0
    assert timings.fetch_bytes_per_s(OTHER, "s3://a", 9.0) == UNTRIED * 2.0 > 2.0
    assert timings.fetch_bytes_per_s(OTHER, "s3://a", 1.0) == 1.0
    assert timings.fetch_bytes_per_s(OTHER, "s3://b", 9.0) == 9.0
    timings = timings.learned(
        [replace(SAMPLE, node_id=OTHER, source="s3://b", fetch_bytes_per_s=8.0)]
    )
    assert timings.fetch_bytes_per_s(NODE, "s3://b", 9.0) == UNTRIED * 8.0


def test_a_node_that_lies_about_its_link_is_found_out() -> None:
    timings = Timings().learned([replace(SAMPLE, source="s3://a", fetch_bytes_per_s=1.0)])
    assert timings.fetch_bytes_per_s(NODE, "s3://new", 100.0) == 1.0


def test_rates_of_devices() -> None:
    timings = Timings()
    assert timings.load_bytes_per_s(NODE, CUDA, 7.0) == 7.0
    assert timings.memory_bytes_per_s(NODE, CUDA, 7.0) == 7.0
    probe = Probe(node_id=NODE, device_kind=CUDA, load_bytes_per_s=50.0, memory_bytes_per_s=4000.0)
    timings = timings.learned(probes=[probe])
    assert timings.load_bytes_per_s(NODE, CUDA, 7.0) == 50.0
    assert timings.memory_bytes_per_s(NODE, CUDA, 7.0) == 4000.0
    assert timings.memory_bytes_per_s(OTHER, CUDA, 7.0) == 4000.0
    timings = timings.learned([replace(SAMPLE, load_bytes_per_s=30.0)])
    assert timings.load_bytes_per_s(NODE, CUDA, 7.0) == 30.0


def test_a_device_reads_its_memory_no_slower_than_it_was_ever_filled() -> None:
    """A start that loads beside other work fills it slowly: prompts do not take longer by that."""
    slow = Timings().learned([replace(SAMPLE, load_bytes_per_s=1.0)])
    assert slow.load_bytes_per_s(NODE, CUDA, 50.0) == 1.0
    assert slow.memory_bytes_per_s(NODE, CUDA, 50.0) == 50.0
    fast = Timings().learned([replace(SAMPLE, load_bytes_per_s=90.0)])
    assert fast.memory_bytes_per_s(NODE, CUDA, 50.0) == 90.0


def test_hops_by_pair_whichever_way() -> None:
    assert Timings().hop_s(NODE, OTHER) == HOP_S
    timings = Timings().learned(hops=[HopSample(first=OTHER, second=NODE, hop_s=0.2)])
    assert timings.hop_s(NODE, OTHER) == timings.hop_s(OTHER, NODE) == 0.2
    assert timings.hop_s(NODE, NodeId("n9")) == 0.2


def test_init_or_the_restore_in_its_place() -> None:
    """What the last start did is what the next one will do."""
    timings = Timings().learned([replace(SAMPLE, init_s=6.0)])
    assert (timings.init_s(MODEL.name, CUDA), timings.restores(MODEL.name, CUDA)) == (6.0, False)
    timings = timings.learned([replace(SAMPLE, restore_s=0.2)])
    assert (timings.init_s(MODEL.name, CUDA), timings.restores(MODEL.name, CUDA)) == (0.2, True)
    timings = timings.learned([replace(SAMPLE, init_s=6.0)])
    assert timings.init_s(MODEL.name, CUDA) == pytest.approx(6.0)
    assert not timings.restores(MODEL.name, CUDA)


def test_decode_reads_device_memory_and_not_the_bus() -> None:
    timings, rate = Timings(), 4000.0 * GB
    parameters = MODEL.device_bytes(MODEL.spec.whole)
    alone_s = timings.decode_s(MODEL, CUDA, rate, 1, 0)
    assert alone_s == pytest.approx(parameters / rate)
    many = timings.decode_s(MODEL, CUDA, rate, 64, 100_000)
    kv_bytes = 64 * 100_000 * MODEL.spec.kv_bytes_per_token(MODEL.spec.whole, MODEL.dtype)
    assert many == pytest.approx((parameters + kv_bytes) / rate)


def test_decode_is_learned_by_what_steps_read() -> None:
    timings, rate = Timings(), 4000.0 * GB
    for batch in (1, 8, 32, 64) * 5:
        read = step_bytes(MODEL, batch, 200_000)
        point = Point(read, 0.002 + 2 * read / rate)
        timings = timings.learned([replace(SAMPLE, decode=point)])
    for batch in (4, 48):
        expected = 0.002 + 2 * step_bytes(MODEL, batch, 200_000) / rate
        assert timings.decode_s(MODEL, CUDA, rate, batch, 200_000) == pytest.approx(
            expected, rel=0.15
        )


def test_prefill_grows_with_the_prompt() -> None:
    """Of an 8B model on a device that reads 4.47 TB/s: within a third of what was measured there
    (design 12): 49 ms for 2,048 tokens, 213 ms for 8,192.
    """
    timings, rate = Timings(), 4470.0 * GB
    model = start_model(layers=36, layer_bytes=int(15.3 * 2**30 / 36), edge_bytes=0)
    assert timings.prefill_s(model, CUDA, rate, 1) == pytest.approx(0.0037, rel=0.05)
    assert timings.prefill_s(model, CUDA, rate, 2048) == pytest.approx(0.049, rel=0.35)
    assert timings.prefill_s(model, CUDA, rate, 8192) == pytest.approx(0.213, rel=0.35)
    for tokens in (64, 4096) * 10:
        point = Point(tokens, 0.01 + tokens * 1e-4)
        timings = timings.learned([replace(SAMPLE, prefill=point)])
    assert timings.prefill_s(model, CUDA, rate, 2048) == pytest.approx(0.2148, rel=0.1)


def test_of_a_device_that_says_no_rate_nothing_is_promised() -> None:
    timings = Timings()
    assert timings.decode_s(MODEL, CUDA, 0.0, 1, 0) == float("inf")
    assert timings.prefill_s(MODEL, CUDA, 0.0, 100) == float("inf")


def test_bytes_of_a_step_by_stage() -> None:
    halves = (Stage(0, 4), Stage(4, 8))
    assert sum(step_bytes(MODEL, 3, 50, one) for one in halves) == step_bytes(MODEL, 3, 50)


def test_other_models_show_how_fast_prompts_are() -> None:
    """A model that never ran is predicted by what its kind of device computed for others."""
    seen, new = (start_model(layer_bytes=size) for size in (GB // 10, GB))
    new = replace(new, name=ModelName("new"))
    took_s = 0.5
    sample = StageSample(
        model=seen.name,
        device_kind=CUDA,
        node_id=NodeId("n0"),
        prefill=Point(512, took_s),
        operations_per_s=prompt_operations(seen, 512) / took_s,
    )
    known = Timings().learned([sample] * 3)
    ratio = prompt_operations(new, 512) / prompt_operations(seen, 512)
    assert known.prefill_s(new, CUDA, 1.0, 512) == pytest.approx(took_s * ratio)
    assert known.prefill_s(new, CUDA, 1.0, 1024) == pytest.approx(2 * took_s * ratio)
    assert known.prefill_s(seen, CUDA, 1.0, 512) == pytest.approx(took_s)
    assert Timings().prefill_s(new, CUDA, 1.0, 512) > 100 * took_s * ratio
