"""The executor of an encoder's layer ranges, on any device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.core.pooled import PoolReading
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.pooling import pool
from pilotlight.engine.device.runner import check_run
from pilotlight.engine.device.sampler import NotSampled, SampledToken
from pilotlight.engine.models.encoder import Encoder
from pilotlight.policy.model import Stage

Within = Callable[[Callable[[], Tensor]], Tensor]
"""Calls a function where the memory that it takes is the stage's."""


class EncoderRunner:
    """As ``RangeRunner``: the same calls. Every segment is a whole text, so nothing is kept of it.

    Texts of one length are attended to together. A range that ends the model gives one row for each
    text, which says whether its vector is a number throughout.
    """

    def __init__(
        self, memory: StageMemory, parameters: Parameters, encoder: Encoder, within: Within
    ) -> None:
        """Nothing is taken yet.

        Args:
            memory: the stage's.
            parameters: the stage's; they may be placed later.
            encoder: the stage's model.
            within: where it takes memory from.
        """
        self._encoder = encoder
        self._memory = memory
        self._parameters = parameters
        self._device = memory.arena.device
        self._within = within

    @torch.inference_mode()
    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """See ``RangeRunner.run``."""
        layers = layers or self._memory.stage
        check_run(self._encoder.spec, self._memory.stage, self._parameters, layers, batch, inputs)
        return self._within(lambda: self._run(batch, inputs.to(self._device), layers))

    def _run(self, batch: Batch, inputs: Tensor, layers: Stage) -> Tensor:
        encoder, spec = self._encoder, self._encoder.spec
        hidden = self._embed(batch, inputs) if layers.start == 0 else inputs
        texts = _texts_of(batch, self._device)
        for layer in range(layers.start, layers.stop):
            hidden = encoder.encode(
                layer,
                self._parameters[layer + 1],
                hidden,
                lambda queries, keys, values: _attend(texts, queries, keys, values),
            )
        if layers.stop < spec.num_layers:
            return hidden
        last = self._parameters[spec.num_layers + 1]

        def finish(rows: Tensor) -> Tensor:
            return encoder.classify(last, encoder.final_norm(last, rows))

        pool(batch.poolings, spec.pooling, hidden, finish, finish)
        return torch.stack([_finite(reading) for reading in batch.poolings])

    def _embed(self, batch: Batch, token_ids: Tensor) -> Tensor:
        positions: list[int] = []
        types: list[int] = []
        for segment, reading in zip(batch.segments, batch.poolings, strict=True):
            second = reading.pooled.asked.second_starts
            first = segment.count if second is None else second
            positions.extend(range(segment.count))
            types.extend([0] * first + [1] * (segment.count - first))
        return self._encoder.embed_texts(
            self._parameters[0],
            token_ids,
            torch.tensor(positions).to(self._device),
            torch.tensor(types).to(self._device),
        )


def tell_finite(rows: Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | NotSampled]:
    """What stands for an encoder's token: it says nothing, or that the vector is no number.

    Args:
        rows: one for each text, of ``EncoderRunner.run``.
        specs: one for each.
    """
    return [
        SampledToken(0, 0.0 if spec.sampling.logprobs else None)
        if finite
        else NotSampled.NOT_FINITE
        for finite, spec in zip(rows.tolist(), specs, strict=True)
    ]


def _finite(reading: PoolReading) -> Tensor:
    return torch.tensor(reading.pooled.summed).isfinite().all()


def _texts_of(batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
    """Rows of the texts, those of one length together: [num_texts, length] each."""
    by_length: dict[int, list[int]] = {}
    row = 0
    for segment in batch.segments:
        by_length.setdefault(segment.count, []).append(row)
        row += segment.count
    return tuple(
        (torch.tensor(starts)[:, None] + torch.arange(length)).to(device)
        for length, starts in by_length.items()
    )


def _attend(texts: Sequence[Tensor], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    seen = torch.empty_like(queries)
    for rows in texts:
        query, key, value = (heads[rows].transpose(1, 2) for heads in (queries, keys, values))
        attended = functional.scaled_dot_product_attention(query, key, value)
        seen[rows] = attended.transpose(1, 2)
    return seen.flatten(1)
