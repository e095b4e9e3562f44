"""A device's time among its users: all of it, once, evenly, as a sum over moments says."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.device_time import DeviceShares


@dataclass(frozen=True)
class Use:
    """One user, in whole ticks."""

    begin: int
    ticks: int


USES = st.lists(st.builds(Use, st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8)
TICK_S = 0.25


def shares_of(uses: list[Use]) -> list[float]:
    shares, had = DeviceShares(), [0.0] * len(uses)
    ends = [(use.begin + use.ticks, 1, number) for number, use in enumerate(uses)]
    begins = [(use.begin, 0, number) for number, use in enumerate(uses)]
    for tick, ends_now, number in sorted(begins + ends):
        if ends_now:
            had[number] = shares.end(number, tick * TICK_S)
        else:
            shares.begin(number, tick * TICK_S)
    assert len(shares) == 0
    return had


@given(uses=USES)
def test_each_tick_is_divided_among_those_that_use_it(uses: list[Use]) -> None:
    expected = [0.0] * len(uses)
    for tick in range(100):
        now = [n for n, use in enumerate(uses) if use.begin <= tick < use.begin + use.ticks]
        for number in now:
            expected[number] += TICK_S / len(now)
    assert shares_of(uses) == pytest.approx(expected)


@given(uses=USES)
def test_no_more_than_passed_is_given_and_all_of_it_while_there_is_a_user(uses: list[Use]) -> None:
    busy = {tick for use in uses for tick in range(use.begin, use.begin + use.ticks)}
    had = shares_of(uses)
    assert sum(had) == pytest.approx(len(busy) * TICK_S)
    assert all(-1e-9 <= s <= use.ticks * TICK_S + 1e-9 for s, use in zip(had, uses, strict=True))


@given(times=st.lists(st.floats(0, 100), min_size=2, max_size=20))
def test_a_clock_that_goes_back_gives_nothing_twice(times: list[float]) -> None:
    shares = DeviceShares()
    shares.begin("a", times[0])
    told = [shares.so_far_s("a", at_s) for at_s in times[1:]]
    assert told == sorted(told)
    assert told[-1] == pytest.approx(max(times) - times[0])


def test_one_that_is_not_known_has_had_nothing() -> None:
    shares = DeviceShares()
    shares.begin("a", 1.0)
    shares.begin("a", 3.0)
    assert shares.end("b", 5.0) == 0.0
    assert shares.end("a", 5.0) == pytest.approx(4.0)
    assert shares.end("a", 9.0) == 0.0


def test_a_year_of_others_takes_no_digits_from_a_share() -> None:
    shares = DeviceShares()
    for number in range(1000):
        shares.begin("other", number * 30_000.0)
        shares.end("other", number * 30_000.0 + 20_000.0)
    shares.begin("a", 4e7)
    assert shares.end("a", 4e7 + 0.001) == pytest.approx(0.001, rel=1e-4)


@given(uses=USES, stays=USES)
def test_what_nobody_uses_is_divided_among_what_is_kept(uses: list[Use], stays: list[Use]) -> None:
    expected, nobodys = [0.0] * len(stays), 0.0
    for tick in range(100):
        if any(use.begin <= tick < use.begin + use.ticks for use in uses):
            continue
        now = [n for n, stay in enumerate(stays) if stay.begin <= tick < stay.begin + stay.ticks]
        nobodys += TICK_S if now else 0.0
        for number in now:
            expected[number] += TICK_S / len(now)
    shares, had = DeviceShares(), [0.0] * len(stays)
    moves = [
        (each.begin + later, order, number)
        for kinds, begins in ((uses, (0, 1)), (stays, (2, 3)))
        for number, each in enumerate(kinds)
        for later, order in ((0, begins[0]), (each.ticks, begins[1]))
    ]
    for tick, order, number in sorted(moves):
        at_s = tick * TICK_S
        if order == 0:
            shares.begin(number, at_s)
        elif order == 1:
            shares.end(number, at_s)
        elif order == 2:
            shares.keep(number, at_s)
        else:
            had[number] = shares.give_up(number, at_s)
    assert had == pytest.approx(expected)
    assert sum(had) == pytest.approx(nobodys)


def test_idle_time_that_is_looked_at_goes_on() -> None:
    shares = DeviceShares()
    shares.keep("a", 1.0)
    shares.keep("b", 3.0)
    assert shares.idle_s("a", 5.0) == 3.0
    shares.keep("a", 6.0)
    assert (shares.idle_s("b", 7.0), shares.give_up("a", 7.0)) == (2.0, 4.0)
    assert (shares.idle_s("a", 9.0), shares.give_up("b", 9.0)) == (0.0, 4.0)
