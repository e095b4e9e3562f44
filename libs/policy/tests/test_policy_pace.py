"""Who had better be told at once that it would wait for too long, and how many may wait."""

import pytest

from pilotlight.policy.pace import (
    LEAST_S,
    LEAST_TURNS,
    LEAST_WAIT_S,
    SHORT_FOR_S,
    STANDING_AFTER_S,
    STANDING_WAIT_S,
    Pace,
    Standing,
    line_room,
    too_late_by_s,
)

FAST = Pace(turns=2_000, over_s=2.0)
LONG, SHORT = 1_000, 100
"""Its turns within ``LEAST_WAIT_S``, and within ``STANDING_WAIT_S``."""
AT_LEAST = 512


@pytest.mark.parametrize(
    ("turns", "over_s", "wait_s"),
    [
        (LEAST_TURNS, LEAST_S, 100 * LEAST_S / LEAST_TURNS),
        (1_000, 2.0, 0.2),
        (LEAST_TURNS - 1, 60.0, None),
        (10_000, LEAST_S / 2, None),
        (0, 0.0, None),
    ],
)
def test_a_wait_follows_from_turns_that_came_if_there_were_enough(turns, over_s, wait_s):
    assert Pace(turns=turns, over_s=over_s).wait_s(100) == wait_s


def test_who_comes_in_time_or_nearly_waits():
    assert too_late_by_s(4.9, within_s=5.0) is None
    assert too_late_by_s(7.0, within_s=5.0) == pytest.approx(2.0)
    # A retry would come later than its turn.
    assert too_late_by_s(LEAST_WAIT_S, within_s=0.1) is None
    assert too_late_by_s(LEAST_WAIT_S + 0.5, within_s=0.1) == pytest.approx(0.5)
    assert too_late_by_s(1e9, within_s=float("inf")) is None


@pytest.mark.parametrize(
    ("turns", "over_s", "within"),
    [(LEAST_TURNS, LEAST_S, 128), (100, 3.0, 33), (LEAST_TURNS - 1, 60.0, 0), (9_000, 0.4, 0)],
)
def test_turns_to_come_follow_from_turns_that_came_if_there_were_enough(turns, over_s, within):
    assert Pace(turns=turns, over_s=over_s).turns_within(1.0) == within


@pytest.mark.parametrize("pace", [Pace(turns=0, over_s=9.0), Pace(turns=AT_LEAST, over_s=1.0)])
def test_a_slow_line_has_its_places_however_long_it_stands(pace):
    room = line_room(pace, 10_000, AT_LEAST, Standing(otherwise_s=0.0), 1e6)
    assert (room.places, room.standing) == (AT_LEAST, Standing())


def looks(standing, *seen):
    """Places at each look, at a time with so many waiting; and the standing in the end."""
    places = []
    for now_s, waiting in seen:
        room = line_room(FAST, waiting, AT_LEAST, standing, now_s)
        places.append(room.places)
        standing = room.standing
    return places, standing


def test_a_line_that_was_long_all_the_time_is_kept_short_until_it_was_short_for_long():
    end_s = 10.0 + STANDING_AFTER_S
    places, standing = looks(
        Standing(), (10.0, SHORT), (end_s - 0.1, LONG), (end_s, SHORT), (end_s + 1, 0)
    )
    assert places == [LONG, LONG, SHORT, SHORT]
    full_s = end_s + 2
    places, _ = looks(
        standing, (full_s, SHORT), (full_s + SHORT_FOR_S - 0.1, 0), (full_s + SHORT_FOR_S, 0)
    )
    assert places == [SHORT, SHORT, LONG]


def test_a_line_that_was_short_once_does_not_stand():
    places, standing = looks(Standing(), (0.0, LONG), (4.9, SHORT - 1), (9.8, LONG), (9.9, LONG))
    assert places == [LONG] * 3 + [SHORT], "it stood since 4.9, at the longest"
    assert standing.kept_short
    places, _ = looks(
        Standing(), (0.0, LONG), (4.9, SHORT - 1), (9.8, LONG), (9.85, 0), (14.8, LONG)
    )
    assert places == [LONG] * 5


def test_somebody_may_wait_at_any_pace():
    kept = Standing(kept_short=True, otherwise_s=0.0)
    assert line_room(Pace(turns=128, over_s=60.0), 0, 1, kept, 1.0).places == 1
    assert line_room(Pace(turns=601, over_s=1.0), 0, 512, kept, 1.0).places == LEAST_TURNS


def life_of_a_line(arrivals_per_s, turns_per_s, seconds, pause_s=0.0, every_s=20.0):
    """Waits of those that are let in, by second, and how many are refused, by second: of a line
    that is served at a pace, but for a pause now and then.
    """
    step_s = 0.01
    pace = Pace(turns=2 * turns_per_s, over_s=2.0)
    standing, waiting, due, come = Standing(), 0, 0.0, 0.0
    waits, refused = [0.0] * seconds, [0] * seconds
    for step in range(round(seconds / step_s)):
        now_s = step * step_s
        if now_s % every_s >= pause_s:
            due += turns_per_s * step_s
            served = min(int(due), waiting)
            due, waiting = (due - served if served else due % 1), waiting - served
        if not waiting and not standing.kept_short:
            standing = Standing()
        come += arrivals_per_s * step_s
        for _ in range(int(come)):
            room = line_room(pace, waiting, AT_LEAST, standing, now_s)
            standing = room.standing
            if waiting < room.places:
                waiting += 1
                waits[int(now_s)] = max(waits[int(now_s)], waiting / turns_per_s)
            else:
                refused[int(now_s)] += 1
        come %= 1
    return waits, refused


def test_pauses_below_a_second_refuse_nobody_at_four_fifths():
    waits, refused = life_of_a_line(800, 1_000, 120, pause_s=0.9)
    assert sum(refused) == 0
    assert 0.6 < max(waits) < LEAST_WAIT_S


def test_where_too_much_is_asked_for_few_wait_and_as_much_is_served():
    waits, refused = life_of_a_line(1_500, 1_000, 60)
    begun_s = round(STANDING_AFTER_S) + 3
    assert max(waits[:begun_s]) <= LEAST_WAIT_S
    assert max(waits[begun_s:]) <= STANDING_WAIT_S + 0.01
    assert sum(refused[begun_s:]) == pytest.approx(500 * (60 - begun_s), rel=0.02)
