"""From logits to tokens on a CUDA device; see ``device.sampler``, which it follows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.cuda.kernels import sampling
from pilotlight.engine.cuda.rows import ALIGN_WORDS
from pilotlight.engine.device.logits import Draw
from pilotlight.engine.device.sampler import ROWS_AT_ONCE, Drawn, Undrawn, sample_group

_SEED_MASK = (1 << 64) - 1


class CudaTokens:
    """Tokens of simple draws, on their way to the host."""

    def __init__(self, chosen: Tensor) -> None:
        """``chosen``: [rows] int32, on the device, as the kernels leave it."""
        self._chosen = chosen
        self._told = torch.empty(chosen.shape, dtype=torch.int32, pin_memory=True)
        self._told.copy_(chosen, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    @property
    def inputs(self) -> Tensor:
        """See ``PendingTokens.inputs``."""
        return self._chosen.clamp_min(0).long()

    def wait(self) -> list[Drawn | Undrawn]:
        """See ``PendingTokens.wait``."""
        self._there.synchronize()
        return [
            Undrawn.NOT_FINITE if token_id == sampling.NOT_FINITE else Drawn(token_id, None) for token_id in self._told.tolist()
        ]


class CudaSampler:
    """Greedy rows, and noisy ones without filters, are drawn by kernels, with one wait for the device; the others follow by torch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_rows = 0

    @torch.inference_mode()
    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn | Undrawn]:
        """Draws one token from each row of logits [len(draws), vocab_size]. What a row gives depends on no other row."""
        drawn = self.launch(logits, draws).wait()
        rest = [row for row, draw in enumerate(draws) if not draw.simple and drawn[row] is not Undrawn.NOT_FINITE]
        for start in range(0, len(rest), ROWS_AT_ONCE):
            rows = rest[start : start + ROWS_AT_ONCE]
            group = sample_group(logits[torch.tensor(rows, device=self._device)].double(), [draws[row] for row in rows])
            for row, token in zip(rows, group, strict=True):
                drawn[row] = token
        return drawn

    @torch.inference_mode()
    def launch(self, logits: Tensor, draws: Sequence[Draw]) -> CudaTokens:
        """Draws as if all draws were simple, without waiting for it. The logits may be overwritten on the device's stream."""
        if not draws:
            # Pieces of prompts alone: nobody gets a token.
            return CudaTokens(torch.empty(0, dtype=torch.int32, device=self._device))
        rows = len(draws)
        if rows > self._max_rows:
            self._max_rows = max(2 * self._max_rows, rows, 64)
            self._scratch = sampling.SamplingScratch(self._max_rows, self._vocab_size, self._device)
        padded = -(-rows // ALIGN_WORDS) * ALIGN_WORDS
        host = torch.empty(5, padded, dtype=torch.int32, pin_memory=True)
        words = host.numpy()
        words[:2].reshape(-1).view(np.float64)[:rows] = [draw.sampling.temperature for draw in draws]
        seeds = np.array([draw.sampling.seed & _SEED_MASK for draw in draws], np.uint64).view(np.int32)
        words[2, :rows], words[3, :rows] = seeds[::2], seeds[1::2]
        words[4, :rows] = [draw.position for draw in draws]
        there = host.to(self._device, non_blocking=True)
        chosen = torch.empty(rows, dtype=torch.int32, device=self._device)
        temperatures = there[:2].view(-1).view(torch.float64)
        sampling.sample(logits, temperatures, (there[2], there[3]), there[4], self._scratch, chosen)
        return CudaTokens(chosen)
