"""Sizes of launches, beside what they are by definition."""

import pytest

from pilotlight.engine.cuda.kernels.sizes import pieces_of, power_of_2


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 63, 64, 65, 1023, 1024, 1025, 6912])
def test_the_smallest_power_of_two_that_is_not_below(least: int):
    found = power_of_2(least)
    assert found in {1 << shift for shift in range(14)}
    assert found >= least > found // 2


@pytest.mark.parametrize(("whole", "size"), [(1, 1), (7, 8), (8, 8), (9, 8), (151_936, 1024)])
def test_pieces_cover_the_whole_and_one_less_does_not(whole: int, size: int):
    found = pieces_of(whole, size)
    assert found * size >= whole > (found - 1) * size
