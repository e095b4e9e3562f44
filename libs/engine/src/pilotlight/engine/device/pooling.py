"""Vectors and scores of prompts, from the hidden states that the last layer gave.

Everything is computed in float32 or wider, whatever the model runs in.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.pooled import PoolReading
from pilotlight.policy.pooling import Pooling, PoolingMode

SMALLEST_LENGTH = 1e-12
"""What a shorter vector's length counts as, as in torch and in sentence-transformers."""


def pool(
    readings: Sequence[PoolReading],
    pooling: Pooling | None,
    hidden: Tensor,
    norm: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
) -> None:
    """Makes of a batch what it is to give of prompts. Waits for the device.

    Args:
        readings: the batch's.
        pooling: the model's.
        hidden: its last hidden states, [num_tokens, hidden_size].
        norm: the final norm, of some of them.
        head: makes logits, or a classifier's score, of some of them before that norm.
    """
    for reading in readings:
        assert pooling is not None, "admission refuses what the model does not give"
        rows = hidden[reading.rows]
        asked = reading.pooled.asked
        if pooling.answers:
            logits = head(rows[-1:])[0, list(asked.answers)].float()
            values = (logits[1] - logits[0])[None]
        elif pooling.mode is PoolingMode.MEAN:
            states = _wide(norm(rows))
            values = states.sum(dim=0) / reading.prompt_tokens
        else:
            values = _wide(norm(rows[:1] if pooling.mode is PoolingMode.CLS else rows[-1:]))[0]
        reading.pooled.take(reading.start, tuple(values.tolist()))
        if reading.start + len(rows) >= reading.prompt_tokens:
            summed = reading.pooled.summed
            reading.pooled.answer(_finished(summed, pooling, asked.dimensions))


def _finished(
    values: Sequence[float], pooling: Pooling, dimensions: int | None
) -> tuple[float, ...]:
    """The answer, of what all chunks of a prompt came to.

    Args:
        values: the pooled states, or a score before its activation.
        pooling: the model's.
        dimensions: as in ``Pooled``.
    """
    vector = torch.tensor(values, dtype=torch.float64)[:dimensions]
    if pooling.sigmoid:
        vector = vector.sigmoid()
    if pooling.normalize:
        vector = functional.normalize(vector, dim=0, eps=SMALLEST_LENGTH)
    return tuple(vector.tolist())


def _wide(states: Tensor) -> Tensor:
    return states if states.dtype is torch.float64 else states.float()
