"""Tallies against prometheus_client's own counters."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest

from pilotlight.common.tallies import Tally

NAMES = ["model", "status"]
LABELS = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["ok", "failed"]))
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
