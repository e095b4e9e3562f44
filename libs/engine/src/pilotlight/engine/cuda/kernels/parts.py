"""Products that are cut up along their width: sums which whatever comes next adds up."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.sizes import pieces_of, power_of_2


@triton.jit
def added_up(x, place, known, PARTS: tl.constexpr, PART_STRIDE: tl.constexpr):
    """The sum of what lies at the same place of each part.

    Args:
        x: the first part.
        place: what of it.
        known: what of that there is.
        PARTS: how many there are.
        PART_STRIDE: from a value to the next part's.

    Returns:
        Of ``place``'s shape, float32.
    """
    total = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * PART_STRIDE + place, mask=known, other=0.0)
    return total


@triton.jit
def _total(
    parts, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART_STRIDE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    total = added_up(parts, place, known, PARTS, PART_STRIDE)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known)


_run_total = Kernel(_total)


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows of a product as sums that are still to be added up."""

    sums: Tensor
    """[parts, padded rows, width], float32."""
    rows: int

    @property
    def stride(self) -> int:
        """From a value to the next part's."""
        return self.sums.shape[1] * self.sums.shape[2]

    def total(self, dtype: torch.dtype) -> Tensor:
        """The rows: [rows, width]."""
        parts, _, width = self.sums.shape
        out = torch.empty(self.rows, width, dtype=dtype, device=self.sums.device)
        block = min(1024, power_of_2(width))
        _run_total(
            (self.rows, pieces_of(width, block)),
            (self.sums, out),
            (width, block, parts, self.stride),
            warps=4,
            variant=(dtype,),
        )
        return out


def parts_of(x: Tensor | Parts | None, otherwise: Tensor) -> tuple[Tensor, int, int]:
    """What a kernel takes that adds ``x`` up: where it lies (``otherwise``, if there is nothing),
    how many parts it has, and how far they are apart.
    """
    if isinstance(x, Parts):
        return x.sums, x.sums.shape[0], x.stride
    return (otherwise, 0, 0) if x is None else (x, 1, 0)


def whole(x: Tensor | Parts | None, dtype: torch.dtype) -> Tensor | None:
    """What is to be added, as one tensor."""
    return x.total(dtype) if isinstance(x, Parts) else x
