"""From logits to tokens on a CUDA device; see ``device.sampler``, which it follows."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.cuda.attention_metadata import ALIGN_WORDS
from pilotlight.engine.cuda.kernels import sampling
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.logprobs import Logprobs, logprobs_of
from pilotlight.engine.device.sampler import ROWS_AT_ONCE, NotSampled, SampledToken, sample_group
from pilotlight.native.arrivals import await_words

_SEED_MASK = (1 << 64) - 1
_ABSENT = -(1 << 31)
"""Where the device has written no token yet; neither a token nor what stands for none."""
_PATIENCE_S = 0.05
"""Steps are shorter but for large prompts, and where the device has failed, which only the driver
tells."""
KEPT = 2
"""Tokens that stay for this many launches, though nobody wants them any more: to let go of memory
that the driver has pinned, and of an event, asks the driver, which may be loading a kernel then."""


class CudaTokens:
    """Tokens of simple specs, on their way to the host."""

    def __init__(self, chosen: Tensor, logprobs: Logprobs | None = None) -> None:
        """Begins to copy what lies on the device.

        Args:
            chosen: [rows] int32, as the kernels leave it.
            logprobs: of the rows that ask for them.
        """
        self._chosen = chosen
        self._told = torch.full(chosen.shape, _ABSENT, dtype=chosen.dtype, pin_memory=True)
        self._told.copy_(chosen, non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.moved(_on_its_way)
        self._there = torch.cuda.Event()
        self._there.record()

    @property
    def inputs(self) -> Tensor:
        """See ``PendingTokens.inputs``."""
        return self._chosen.clamp_min(0).long()

    @property
    def there(self) -> bool:
        """See ``PendingTokens.there``."""
        words = self._told
        if not words.numel() or self._logprobs is not None:
            return self._there.query()
        return bool((words != _ABSENT).all())

    def wait(self) -> list[SampledToken | NotSampled]:
        """See ``PendingTokens.wait``."""
        if not self._come():
            self._there.synchronize()
        sampled: list[SampledToken | NotSampled] = [
            NotSampled.NOT_FINITE
            if token_id == sampling.NOT_FINITE
            else SampledToken(token_id, None)
            for token_id in self._told.tolist()
        ]
        return sampled if self._logprobs is None else self._logprobs.added_to(sampled)

    def _come(self) -> bool:
        """Waits for a while without the driver; whether all is there by that.

        Where graphs are made beside steps, the driver may wait for the step launched after this one
        before it loads a kernel, and whoever asks it for the end of this one waits as well.
        """
        words = self._told
        # Pieces of prompts alone give no token that could come, and take their time all the same.
        if not words.numel() or self._logprobs is not None:
            return False
        return await_words(words.data_ptr(), words.numel(), _ABSENT, _PATIENCE_S)


class CudaSampler:
    """Greedy rows, and noisy ones without filters, are sampled by kernels, with one wait for the
    device, also for log probabilities; the others follow by torch.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_rows = 0
        self._kept: deque[CudaTokens] = deque(maxlen=KEPT)

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, specs: Sequence[SampleSpec]
    ) -> list[SampledToken | NotSampled]:
        """Samples one token from each row of logits [len(specs), vocab_size].

        What a row gives depends on no other row.
        """
        sampled = self.launch(logits, specs).wait()
        rest = [
            row
            for row, spec in enumerate(specs)
            if not spec.simple and sampled[row] is not NotSampled.NOT_FINITE
        ]
        for start in range(0, len(rest), ROWS_AT_ONCE):
            rows = rest[start : start + ROWS_AT_ONCE]
            group = sample_group(
                logits[torch.tensor(rows, device=self._device)].double(),
                [specs[row] for row in rows],
            )
            for row, token in zip(rows, group, strict=True):
                sampled[row] = token
        return sampled

    @torch.inference_mode()
    def launch(self, logits: Tensor, specs: Sequence[SampleSpec]) -> CudaTokens:
        """Samples as if all specs were simple, without waiting for it.

        The logits may be overwritten on the device's stream.
        """
        if not specs:
            # Pieces of prompts alone: no request gets a token.
            return CudaTokens(torch.empty(0, dtype=torch.int32, device=self._device))
        rows = len(specs)
        if rows > self._max_rows:
            self._max_rows = max(2 * self._max_rows, rows, 64)
            self._scratch = sampling.SamplingScratch(self._max_rows, self._vocab_size, self._device)
        padded = -(-rows // ALIGN_WORDS) * ALIGN_WORDS
        host = torch.empty(5, padded, dtype=torch.int32, pin_memory=True)
        words = host.numpy()
        words[:2].reshape(-1).view(np.float64)[:rows] = [
            spec.sampling.temperature for spec in specs
        ]
        seeds = np.array([spec.sampling.seed & _SEED_MASK for spec in specs], np.uint64).view(
            np.int32
        )
        words[2, :rows], words[3, :rows] = seeds[::2], seeds[1::2]
        words[4, :rows] = [spec.position for spec in specs]
        there = host.to(self._device, non_blocking=True)
        chosen = torch.empty(rows, dtype=torch.int32, device=self._device)
        temperatures = there[:2].view(-1).view(torch.float64)
        sampling.sample(logits, temperatures, (there[2], there[3]), there[4], self._scratch, chosen)
        tokens = CudaTokens(chosen, logprobs_of(logits, chosen, specs))
        self._kept.append(tokens)
        return tokens


def _on_its_way(values: Tensor) -> Tensor:
    """Memory of the host to which values are being copied."""
    told = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return told.copy_(values, non_blocking=True)
