"""Tallies against prometheus_client's own counters."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pilotlight.common.tallies import HistogramTally, Tally

NAMES = ["model", "status"]
LABELS = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["ok", "failed"]))
BOUNDS = (0.01, 0.5, 1.0, 30.0)
VALUES = st.sampled_from((0.0, *BOUNDS, 31.0)) | st.floats(0, 100)
STEPS = st.lists(st.none() | st.tuples(LABELS, st.integers(0, 1000)))


def shown(registry):
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#") and "_created" not in line)


@given(STEPS)
def test_a_tally_shows_what_a_counter_shows(steps):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("pilotlight_test", "Things.", NAMES, ours)
    counter = Counter("pilotlight_test", "Things.", NAMES, registry=theirs)
    for step in steps:
        if step is None:
            assert shown(ours) == shown(theirs)
        else:
            labels, amount = step
            tally.add(*labels, amount=amount)
            counter.labels(*labels).inc(amount)
    assert shown(ours) == shown(theirs)


def test_a_tally_without_labels_is_zero_before_anything_is_counted():
    registry = CollectorRegistry()
    tally = Tally("pilotlight_test", "Things.", (), registry)
    assert registry.get_sample_value("pilotlight_test_total") == 0.0
    tally.add()
    tally.add()
    assert registry.get_sample_value("pilotlight_test_total") == 2.0


@given(st.lists(st.tuples(LABELS, VALUES)))
def test_a_histogram_shows_what_prometheus_own_shows(observed):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = HistogramTally("pilotlight_test", "Things.", NAMES, BOUNDS, ours)
    histogram = Histogram("pilotlight_test", "Things.", NAMES, buckets=BOUNDS, registry=theirs)
    for labels, value in observed:
        tally.series(*labels).observe(value)
        histogram.labels(*labels).observe(value)
    assert shown(ours) == shown(theirs)


def test_a_histogram_without_labels_is_there_before_anything_is_counted():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    HistogramTally("pilotlight_test", "Things.", (), BOUNDS, ours)
    Histogram("pilotlight_test", "Things.", buckets=BOUNDS, registry=theirs)
    assert shown(ours) == shown(theirs)
