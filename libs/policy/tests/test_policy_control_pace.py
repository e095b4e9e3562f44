"""How many starts a tick begins, by what ticks take."""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.control.pace import AIM_S, LIMIT_S, MOST, next_starts


def test_short_ticks_begin_more_and_long_ones_fewer() -> None:
    assert next_starts(8, 8, AIM_S / 2, 8) == 10
    assert next_starts(20, 20, LIMIT_S * 1.5, 8) == 15
    assert next_starts(20, 20, (AIM_S + LIMIT_S) / 2, 8) == 20
    assert next_starts(20, 3, AIM_S / 2, 8) == 20, "a tick that had few to begin says nothing"
    assert next_starts(20, 0, 1.0, 8) == 20, "a term's first tick looks at everything"


@given(st.integers(1, 40), st.floats(1e-4, 5e-3), st.floats(0.0, 8e-3))
def test_it_comes_to_rest_within_the_time_of_a_tick(
    least: int, each_s: float, base_s: float
) -> None:
    most = least
    for _ in range(40):
        most = next_starts(most, most, base_s + most * each_s, least)
        assert least <= most <= max(least, MOST)
    for _ in range(8):
        most = next_starts(most, most, base_s + most * each_s, least)
        # One step further than the aim at most, and back.
        assert most == least or base_s + most * each_s <= LIMIT_S * 1.3
