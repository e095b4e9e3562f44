"""One token from each row of logits, by greed or by noise, as ``device.sampler`` samples it:
probabilities in float64, shares in the order of ids, noise from Philox by seed and position.

Three launches. The first looks at pieces of the vocabulary: the largest logit, its first id, and
whether all are finite. The others add up what each piece weighs and find the token in whose share
the noise falls. What a row gives depends on no other row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotlight.engine.cuda.kernels.launching import Kernel
from pilotlight.engine.cuda.kernels.sizes import pieces_of, power_of_2

PIECE = 2048
NOT_FINITE = -1


@triton.jit
def _survey(
    logits,
    tops,
    ids,
    finite,
    STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0)
    piece = tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    known = token < VOCABULARY
    value = tl.load(logits + row.to(tl.int64) * STRIDE + token, mask=known, other=float("-inf")).to(
        tl.float32
    )
    top, index = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    usable = tl.where(known, (tl.abs(value) < float("inf")).to(tl.int32), 1)
    tl.store(tops + row * PIECES + piece, top)
    tl.store(ids + row * PIECES + piece, piece * PIECE + index)
    tl.store(finite + row * PIECES + piece, tl.min(usable, axis=0))


@triton.jit
def _weigh(
    logits, tops, temperatures, weights, STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PADDED_PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        piece = tl.program_id(1)
        number = tl.arange(0, PADDED_PIECES)
        top = tl.max(
            tl.load(tops + row * PIECES + number, mask=number < PIECES, other=float("-inf")), axis=0
        ).to(tl.float64)
        token = piece * PIECE + tl.arange(0, PIECE)
        value = tl.load(
            logits + row.to(tl.int64) * STRIDE + token, mask=token < VOCABULARY, other=float("-inf")
        ).to(tl.float64)
        tl.store(
            weights + row * PIECES + piece, tl.sum(tl.exp((value - top) / temperature), axis=0)
        )


@triton.jit
def _philox_word(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32; the first two words."""
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, 0xD2511F53)
        low_0 = c0 * 0xD2511F53
        high_1 = tl.umulhi(c2, 0xCD9E8D57)
        low_1 = c2 * 0xCD9E8D57
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1


@triton.jit
def _choose(
    logits, tops, ids, finite, temperatures, weights, low_seeds, high_seeds, positions, chosen, STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PADDED_PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    number = tl.arange(0, PADDED_PIECES)
    known = number < PIECES
    pieces_tops = tl.load(tops + row * PIECES + number, mask=known, other=float("-inf"))
    usable = tl.min(tl.load(finite + row * PIECES + number, mask=known, other=1), axis=0)
    top, best_piece = tl.max(
        pieces_tops, axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    token_id = tl.load(ids + row * PIECES + best_piece)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (usable > 0):
        counter = tl.load(positions + row).to(tl.uint32, bitcast=True)
        nothing = tl.zeros_like(counter)
        k0 = tl.load(low_seeds + row).to(tl.uint32, bitcast=True)
        k1 = tl.load(high_seeds + row).to(tl.uint32, bitcast=True)
        high, low = _philox_word(counter, nothing, nothing, nothing, k0, k1)
        noise = (((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11).to(tl.float64) * (
            1.0 / 9007199254740992.0
        )
        parts = tl.load(weights + row * PIECES + number, mask=known, other=0.0)
        point = tl.sum(parts, axis=0) * noise
        cumulated = tl.cumsum(parts, axis=0)
        # The first piece that ends behind the point, or, where rounding has put the point at the
        # end, the last one with a share.
        last = tl.max(tl.where(parts > 0, number, 0), axis=0)
        piece = tl.minimum(tl.sum(((cumulated <= point) & known).to(tl.int32), axis=0), last)
        before = tl.sum(tl.where(number < piece, parts, 0.0), axis=0)
        token = piece * PIECE + tl.arange(0, PIECE)
        value = tl.load(
            logits + row.to(tl.int64) * STRIDE + token, mask=token < VOCABULARY, other=float("-inf")
        ).to(tl.float64)
        shares = tl.exp((value - top.to(tl.float64)) / temperature)
        within = before + tl.cumsum(shares, axis=0)
        inside = tl.sum((within <= point).to(tl.int32), axis=0)
        last_inside = tl.max(tl.where(shares > 0, tl.arange(0, PIECE), 0), axis=0)
        token_id = piece * PIECE + tl.minimum(inside, last_inside)
    tl.store(chosen + row, tl.where(usable > 0, token_id, -1))


_run_survey, _run_weigh, _run_choose = Kernel(_survey), Kernel(_weigh), Kernel(_choose)


class SamplingScratch:
    """What one launch leaves for the next."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.pieces = pieces_of(vocab_size, PIECE)
        self.tops = torch.empty(max_rows, self.pieces, dtype=torch.float32, device=device)
        self.ids = torch.empty(max_rows, self.pieces, dtype=torch.int32, device=device)
        self.finite = torch.empty(max_rows, self.pieces, dtype=torch.int32, device=device)
        self.weights = torch.empty(max_rows, self.pieces, dtype=torch.float64, device=device)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: tuple[Tensor, Tensor],
    positions: Tensor,
    scratch: SamplingScratch,
    out: Tensor,
) -> None:
    """Samples a token from each row.

    Args:
        logits: [rows, vocab_size].
        temperatures: [rows] float64; 0 is greed.
        seeds: low and high words of each row's seed, [rows] int32 each.
        positions: [rows] int32: the counter of the noise.
        scratch: for at least as many rows.
        out: [rows] int32: the token, or ``NOT_FINITE``.
    """
    rows, vocab_size = logits.shape
    pieces = scratch.pieces
    padded = power_of_2(pieces)
    stride = logits.stride(0)
    tops, ids, finite, weights = scratch.tops, scratch.ids, scratch.finite, scratch.weights
    _run_survey(
        (rows, pieces), (logits, tops, ids, finite), (stride, vocab_size, PIECE, pieces), warps=4
    )
    constants = (stride, vocab_size, PIECE, pieces, padded)
    _run_weigh((rows, pieces), (logits, tops, temperatures, weights), constants, warps=4)
    _run_choose(
        (rows, 1),
        (logits, tops, ids, finite, temperatures, weights, *seeds, positions, out),
        constants,
        warps=4,
    )
