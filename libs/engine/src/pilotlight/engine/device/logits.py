"""What changes logits before a token is sampled.

All of it is sparse but the grammar's mask, and is done for a batch at once.

::

    logits ─> repetition ─> frequency and presence ─> bias ─> grammar ─> min_tokens ─> (sampler) temperature ─> filters

The order is vLLM's and that of transformers where they agree; the bias comes after the penalties,
so that none of them scales it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.core.counts import TokenCounts
from pilotlight.policy.request import Sampling

OUT = float("-inf")


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one row of logits is to be sampled."""

    sampling: Sampling
    position: int
    """The output position that is sampled: the counter of its noise."""
    counts: TokenCounts | None = None
    """What the penalties count; needed if there are any."""
    allowed: bytes | None = None
    """A bit for each token, lowest first, from a grammar; None allows all."""
    may_end: bool = True
    """The grammar lets the output end here: stop tokens may come whether they are in ``allowed`` or
    not."""

    @property
    def adjusts(self) -> bool:
        """The logits do not stay as they are."""
        return (
            self.counts is not None
            or bool(self.sampling.logit_bias)
            or self.allowed is not None
            or self.without_stops
        )

    @property
    def simple(self) -> bool:
        """Nothing but temperature stands between the logits and the token."""
        sampling = self.sampling
        filtered = sampling.temperature > 0 and (
            sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        )
        return not (filtered or self.adjusts)

    @property
    def without_stops(self) -> bool:
        """Stop tokens may not come yet."""
        return self.position < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)

    def stops_below(self, vocab_size: int) -> list[int]:
        """Stop tokens that there are."""
        return [token_id for token_id in self.sampling.stop_token_ids if 0 <= token_id < vocab_size]


def adjust(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Changes logits [len(specs), vocab_size], which must be finite, in place.

    What may not come becomes -inf.
    """
    _penalise_repetition(logits, specs)
    _penalise_counts(logits, specs)
    _add_bias(logits, specs)
    _mask_by_grammar(logits, specs)
    _mask_stops(logits, specs)


def _penalise_repetition(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    for row, spec in enumerate(specs):
        if spec.counts is not None and spec.sampling.repetition_penalty != 1:
            seen = spec.counts.prompt | spec.counts.output.keys()
            rows += [row] * len(seen)
            ids += seen
            penalties += [spec.sampling.repetition_penalty] * len(seen)
    if rows:
        device = logits.device
        where = torch.tensor(rows, device=device), torch.tensor(ids, device=device)
        found, penalty = logits[where], torch.tensor(penalties, dtype=logits.dtype, device=device)
        logits[where] = torch.where(found > 0, found / penalty, found * penalty)


def _penalise_counts(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    for row, spec in enumerate(specs):
        presence, frequency = spec.sampling.presence_penalty, spec.sampling.frequency_penalty
        if spec.counts is not None and (presence or frequency):
            rows += [row] * len(spec.counts.output)
            ids += spec.counts.output.keys()
            penalties += [presence + frequency * count for count in spec.counts.output.values()]
    if rows:
        device = logits.device
        taken = torch.tensor(penalties, dtype=logits.dtype, device=device)
        logits[torch.tensor(rows, device=device), torch.tensor(ids, device=device)] -= taken


def _add_bias(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    entries = [
        (row, token_id, bias)
        for row, spec in enumerate(specs)
        for token_id, bias in spec.sampling.logit_bias
    ]
    if entries:
        rows, ids, biases = zip(*entries, strict=True)
        device = logits.device
        added = torch.tensor(biases, dtype=logits.dtype, device=device)
        logits[torch.tensor(rows, device=device), torch.tensor(ids, device=device)] += added


def _mask_stops(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    entries = [
        (row, token_id)
        for row, spec in enumerate(specs)
        if spec.without_stops
        for token_id in spec.stops_below(logits.shape[1])
    ]
    if entries:
        rows, ids = zip(*entries, strict=True)
        logits[
            torch.tensor(rows, device=logits.device), torch.tensor(ids, device=logits.device)
        ] = OUT


def _mask_by_grammar(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows = [row for row, spec in enumerate(specs) if spec.allowed is not None]
    if rows:
        packed = np.stack(
            [np.frombuffer(spec.allowed, np.uint8) for spec in specs if spec.allowed is not None]
        )
        allowed = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
        for row, mask in zip(rows, allowed, strict=True):
            if specs[row].may_end:
                mask[specs[row].stops_below(logits.shape[1])] = 1
        where, banned = (
            torch.tensor(rows, device=logits.device),
            torch.from_numpy(allowed).to(logits.device) == 0,
        )
        logits[where] = logits[where].masked_fill(banned, OUT)
