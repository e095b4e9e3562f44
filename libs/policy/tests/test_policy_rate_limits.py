"""GCRA against a count of every window, with what is given back, and shares of gateways."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.rate_limits import (
    BURST_S,
    Charge,
    Meter,
    charge_of,
    give_back,
    left,
    owed,
    rescaled,
    returnable,
    share_of,
    take,
    unheard_bound,
    wait_s,
)

NEAR = 1e-6


@dataclass
class Taken:
    at_s: float
    units: float
    charge: Charge


requests = st.lists(
    st.tuples(
        st.floats(0, 30),  # seconds since the one before
        st.floats(0.5, 80),  # units that are asked for
        st.floats(0, 1),  # the part of them that is used
        st.floats(0, 40),  # seconds that it takes
    ),
    min_size=1,
    max_size=40,
)


@given(limit=st.integers(1, 200), asked=requests)
def test_no_window_has_more_than_a_burst_and_its_time(
    limit: int, asked: list[tuple[float, float, float, float]]
) -> None:
    meter, now_s = Meter(), 1000.0
    taken: list[Taken] = []
    running: list[tuple[float, Taken, float]] = []
    for gap_s, units, used, takes_s in asked:
        now_s += gap_s
        for end in sorted((one for one in running if one[0] <= now_s), key=lambda one: one[0]):
            running.remove(end)
            at_s, one, unused = end
            back = returnable(meter, one.charge, limit, unused, at_s)
            assert back >= 0
            one.units -= back
            meter = give_back(meter, limit, back, at_s)
        units = min(units, limit)
        if wait_s(meter, limit, units, now_s) > 0:
            continue
        assert left(meter, limit, now_s) >= units - NEAR
        meter = take(meter, limit, units, now_s)
        one = Taken(now_s, units, charge_of(meter))
        taken.append(one)
        running.append((now_s + takes_s, one, units * (1 - used)))
    # The reference: every window from one request to another, counted.
    for first, begin in enumerate(taken):
        total = 0.0
        for one in taken[first:]:
            total += one.units
            assert total <= limit + limit * (one.at_s - begin.at_s) / 60 + NEAR * limit


@given(limit=st.integers(1, 1000), units=st.integers(1, 1000), later_s=st.floats(0.001, 600))
def test_after_the_wait_it_is_let_in_and_not_before(limit: int, units: int, later_s: float) -> None:
    meter = take(Meter(), limit, limit, 0.0)
    needed_s = wait_s(meter, limit, units, 0.0)
    assert needed_s == pytest.approx(min(units * 60 / limit, BURST_S))
    assert wait_s(meter, limit, units, needed_s + NEAR) == 0.0
    if needed_s > 2 * NEAR:
        assert wait_s(meter, limit, units, needed_s - 2 * NEAR) > 0.0


def test_what_time_has_paid_back_is_not_given_back_again() -> None:
    """A long request whose estimate was paid by time must not pay for another's."""
    meter = take(Meter(), 60, 60, 0.0)
    long = charge_of(meter)
    meter = take(meter, 60, 50, 50.0)
    assert returnable(meter, long, 60, 55, 50.0) == pytest.approx(10)
    assert returnable(meter, long, 60, 55, 61.0) == 0.0
    assert returnable(meter, long, 60, 3, 50.0) == pytest.approx(3)


def test_a_new_limit_keeps_what_is_owed() -> None:
    meter = take(Meter(), 60, 30, 0.0)
    assert owed(rescaled(meter, 60, 600, 10.0), 600, 10.0) == pytest.approx(20)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=16))
def test_shares_are_one_together(recent: list[float]) -> None:
    everyone = sum(recent)
    shares = [share_of(own, everyone, len(recent)) for own in recent]
    assert sum(shares) == pytest.approx(1)
    assert sum(unheard_bound(100, 50, share) for share in shares) == pytest.approx(
        50 + 2 * len(recent)
    )
