"""Numbers of rows that projections run with."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from pilotlight.engine.models.layers import FEW_ROWS, padded_rows, project

STEP_TOKENS = 512


def test_few_numbers_of_rows_are_run_and_little_is_added() -> None:
    sizes = [padded_rows(rows) for rows in range(2, STEP_TOKENS + 1)]
    assert len(set(sizes)) == 35
    assert all(before <= after for before, after in pairwise(sizes))
    for rows, size in enumerate(sizes, start=2):
        assert rows <= size
        assert size <= (rows * 1.125 if rows > FEW_ROWS else FEW_ROWS)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 31, 32, 33, 35, 100, 129])
def test_rows_that_are_added_change_nothing(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = (
        torch.randn(rows, 64, dtype=torch.bfloat16),
        torch.randn(48, 64, dtype=torch.bfloat16),
    )
    projected = project(x, weight)
    assert projected.shape == (rows, 48)
    assert projected.dtype is torch.bfloat16
    assert projected.is_contiguous()
    torch.testing.assert_close(
        projected.float(), functional.linear(x.float(), weight.float()), rtol=1e-2, atol=1e-1
    )
