"""What changes logits before a token is drawn. All of it is sparse but the grammar's mask, and is done for a batch at once.

::

    logits ─> repetition ─> frequency and presence ─> bias ─> grammar ─> min_tokens ─> (sampler) temperature ─> filters

The order is vLLM's and that of transformers where they agree; the bias comes after the penalties, so that none of them scales it.
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
class Draw:
    """How one row of logits is to be drawn from."""

    sampling: Sampling
    position: int
    """The output position that is drawn: the counter of its noise."""
    counts: TokenCounts | None = None
    """What the penalties count; needed if there are any."""
    allowed: bytes | None = None
    """A bit for each token, lowest first, from a grammar; None allows all."""
    may_end: bool = True
    """The grammar lets the output end here: stop tokens may be drawn whether they are in ``allowed`` or not."""

    @property
    def adjusts(self) -> bool:
        """The logits do not stay as they are."""
        return self.counts is not None or bool(self.sampling.logit_bias) or self.allowed is not None or self.without_stops

    @property
    def simple(self) -> bool:
        """Nothing but temperature stands between the logits and the token, and nothing but the token is asked for."""
        sampling = self.sampling
        filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        return not (filtered or sampling.logprobs or self.adjusts)

    @property
    def without_stops(self) -> bool:
        """Stop tokens may not be drawn yet."""
        return self.position < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)

    def stops_below(self, vocab_size: int) -> list[int]:
        """Stop tokens that there are."""
        return [token_id for token_id in self.sampling.stop_token_ids if 0 <= token_id < vocab_size]


def adjust(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Changes logits [len(draws), vocab_size], which must be finite, in place. What may not be drawn becomes -inf."""
    _penalise_repetition(logits, draws)
    _penalise_counts(logits, draws)
    _add_bias(logits, draws)
    _mask_by_grammar(logits, draws)
    _mask_stops(logits, draws)


def _penalise_repetition(logits: Tensor, draws: Sequence[Draw]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    for row, draw in enumerate(draws):
        if draw.counts is not None and draw.sampling.repetition_penalty != 1:
            seen = draw.counts.prompt | draw.counts.output.keys()
            rows += [row] * len(seen)
            ids += seen
            penalties += [draw.sampling.repetition_penalty] * len(seen)
    if rows:
        device = logits.device
        where = torch.tensor(rows, device=device), torch.tensor(ids, device=device)
        found, penalty = logits[where], torch.tensor(penalties, dtype=logits.dtype, device=device)
        logits[where] = torch.where(found > 0, found / penalty, found * penalty)


def _penalise_counts(logits: Tensor, draws: Sequence[Draw]) -> None:
    rows: list[int] = []
    ids: list[int] = []
    penalties: list[float] = []
    for row, draw in enumerate(draws):
        presence, frequency = draw.sampling.presence_penalty, draw.sampling.frequency_penalty
        if draw.counts is not None and (presence or frequency):
            rows += [row] * len(draw.counts.output)
            ids += draw.counts.output.keys()
            penalties += [presence + frequency * count for count in draw.counts.output.values()]
    if rows:
        device = logits.device
        taken = torch.tensor(penalties, dtype=logits.dtype, device=device)
        logits[torch.tensor(rows, device=device), torch.tensor(ids, device=device)] -= taken


def _add_bias(logits: Tensor, draws: Sequence[Draw]) -> None:
    entries = [(row, token_id, bias) for row, draw in enumerate(draws) for token_id, bias in draw.sampling.logit_bias]
    if entries:
        rows, ids, biases = zip(*entries, strict=True)
        device = logits.device
        added = torch.tensor(biases, dtype=logits.dtype, device=device)
        logits[torch.tensor(rows, device=device), torch.tensor(ids, device=device)] += added


def _mask_stops(logits: Tensor, draws: Sequence[Draw]) -> None:
    entries = [
        (row, token_id) for row, draw in enumerate(draws) if draw.without_stops for token_id in draw.stops_below(logits.shape[1])
    ]
    if entries:
        rows, ids = zip(*entries, strict=True)
        logits[torch.tensor(rows, device=logits.device), torch.tensor(ids, device=logits.device)] = OUT


def _mask_by_grammar(logits: Tensor, draws: Sequence[Draw]) -> None:
    rows = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    if rows:
        packed = np.stack([np.frombuffer(draw.allowed, np.uint8) for draw in draws if draw.allowed is not None])
        allowed = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
        for row, mask in zip(rows, allowed, strict=True):
            if draws[row].may_end:
                mask[draws[row].stops_below(logits.shape[1])] = 1
        where, banned = torch.tensor(rows, device=logits.device), torch.from_numpy(allowed).to(logits.device) == 0
        logits[where] = logits[where].masked_fill(banned, OUT)
