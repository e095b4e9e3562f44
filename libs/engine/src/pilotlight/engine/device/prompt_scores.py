"""Log probabilities of prompts, from the hidden states that the last layer gave."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pilotlight.engine.core.prompt_scores import Reading
from pilotlight.engine.device.logprobs import of_some
from pilotlight.engine.device.sampler import ROWS_AT_ONCE

LOWEST = -9999.0
"""What is said of a token that cannot come: JSON knows no infinity."""


def score(readings: Sequence[Reading], hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Scores what a batch is to say of prompts. Waits for the device.

    Args:
        readings: the batch's.
        hidden: its last hidden states, [num_tokens, hidden_size].
        head: makes logits of some of them.
    """
    for reading in readings:
        for first in range(0, len(reading.targets), ROWS_AT_ONCE):
            targets = reading.targets[first : first + ROWS_AT_ONCE]
            row = reading.row + first
            _score_some(reading, first, targets, head(hidden[row : row + len(targets)]))


def _score_some(reading: Reading, first: int, targets: Sequence[int], logits: Tensor) -> None:
    chosen = torch.tensor(targets, device=logits.device)
    most = min(reading.scores.wanted, logits.shape[1])
    logprobs, top_ids, top = of_some(logits, chosen, most)
    ranks = (logits > logits.gather(1, chosen[:, None])).sum(dim=-1) + 1
    best = zip(top_ids.tolist(), top.clamp_min(LOWEST).tolist(), strict=True)
    reading.scores.take(
        reading.start + first,
        logprobs.clamp_min(LOWEST).tolist(),
        ranks.tolist(),
        [tuple(zip(ids, values, strict=True)) for ids, values in best],
    )
