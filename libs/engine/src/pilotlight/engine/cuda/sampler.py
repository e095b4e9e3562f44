"""From logits to tokens on a CUDA device; see ``device.sampler``, which it follows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.cuda.kernels import sampling
from pilotlight.engine.device.logits import Draw
from pilotlight.engine.device.sampler import ROWS_AT_ONCE, Drawn, Undrawn, sample_group

_SEED_MASK = (1 << 64) - 1


class CudaSampler:
    """Greedy rows, and noisy ones without filters, are drawn by kernels, with one wait for the device; the others follow by torch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_rows = 0

    @torch.inference_mode()
    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn | Undrawn]:
        """Draws one token from each row of logits [len(draws), vocab_size]. What a row gives depends on no other row."""
        chosen = self._launch(logits, draws)
        told = torch.empty(len(draws), dtype=torch.int32, pin_memory=True)
        told.copy_(chosen, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        drawn: list[Drawn | Undrawn] = [
            Undrawn.NOT_FINITE if token_id == sampling.NOT_FINITE else Drawn(token_id, None) for token_id in told.tolist()
        ]
        rest = [row for row, draw in enumerate(draws) if not _is_simple(draw) and drawn[row] is not Undrawn.NOT_FINITE]
        for start in range(0, len(rest), ROWS_AT_ONCE):
            rows = rest[start : start + ROWS_AT_ONCE]
            group = sample_group(logits[torch.tensor(rows, device=self._device)].double(), [draws[row] for row in rows])
            for row, token in zip(rows, group, strict=True):
                drawn[row] = token
        return drawn

    def _launch(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        rows = len(draws)
        if rows > self._max_rows:
            self._max_rows = max(2 * self._max_rows, rows, 64)
            self._scratch = sampling.SamplingScratch(self._max_rows, self._vocab_size, self._device)
        host = torch.empty(rows, 5, dtype=torch.int32, pin_memory=True)
        words = host.numpy().reshape(-1)
        words[: 2 * rows].view(np.float64)[:] = [draw.sampling.temperature for draw in draws]
        seeds = np.array([draw.sampling.seed & _SEED_MASK for draw in draws], np.uint64).view(np.int32)
        words[2 * rows : 3 * rows], words[3 * rows : 4 * rows] = seeds[::2], seeds[1::2]
        words[4 * rows :] = [draw.position for draw in draws]
        there = host.to(self._device, non_blocking=True).view(-1)
        temperatures = there[: 2 * rows].view(torch.float64)
        low, high, positions = there[2 * rows :].split(rows)
        chosen = torch.empty(rows, dtype=torch.int32, device=self._device)
        sampling.sample(logits, temperatures, (low, high), positions, self._scratch, chosen)
        return chosen


def _is_simple(draw: Draw) -> bool:
    sampling = draw.sampling
    filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    return not (filtered or sampling.logprobs or draw.adjusts)
