"""Who had better be told at once that it would wait for too long."""

import pytest

from pilotlight.policy.pace import LEAST_S, LEAST_TURNS, LEAST_WAIT_S, Pace, too_late_by_s


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
