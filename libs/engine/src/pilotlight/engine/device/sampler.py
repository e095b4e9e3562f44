"""From logits to tokens, without state: seed, position, the tokens before and the logits say
all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from pilotlight.engine.core.philox import uniform
from pilotlight.engine.device.logits import OUT, SampleSpec, adjust

ROWS_AT_ONCE = 16
"""Rows that are widened to float64 together: with all of a large batch, and a large vocabulary,
that would take as much memory as some models."""


class NotSampled(Enum):
    """Why a row gave no token. Stages send each other the values: they stay as they are."""

    NOT_FINITE = "the logits are not finite"
    NOTHING_LEFT = "no token may be drawn"
    LATE = "it is not known yet which token may be drawn"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token."""

    token_id: int
    logprob: float | None
    """Natural logarithm of its probability before anything is done to the logits, if asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log probabilities of the most probable tokens, the same way."""


class PendingTokens(Protocol):
    """Tokens that a device is sampling."""

    @property
    def inputs(self) -> Tensor:
        """What the first stage embeds after them, on the device: [rows] int64, some token for a row
        that has none.
        """
        ...

    @property
    def there(self) -> bool:
        """They need not be waited for."""
        ...

    def wait(self) -> list[SampledToken | NotSampled]:
        """The tokens, as ``sample`` gives them, as soon as they are there."""
        ...


@torch.inference_mode()
def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | NotSampled]:
    """Samples one token from each row of logits [len(specs), vocab_size].

    What a row gives depends on no other row.
    """
    usable = _finite(logits)
    greedy: list[int] = logits.max(dim=-1).indices.tolist()
    sampled: list[SampledToken | NotSampled] = [
        SampledToken(token_id, None) if fit else NotSampled.NOT_FINITE
        for token_id, fit in zip(greedy, usable, strict=True)
    ]
    rest = [row for row, spec in enumerate(specs) if usable[row] and _wants_more(spec)]
    for start in range(0, len(rest), ROWS_AT_ONCE):
        rows = rest[start : start + ROWS_AT_ONCE]
        group = sample_group(logits[torch.tensor(rows)].double(), [specs[row] for row in rows])
        for row, token in zip(rows, group, strict=True):
            sampled[row] = token
    return sampled


def _finite(logits: Tensor) -> list[bool]:
    """Which rows hold neither NaN nor an infinity.

    A finite sum says so at a fraction of the time of looking at each.
    """
    sums = logits.sum(dim=-1, dtype=torch.float64)
    return [
        math.isfinite(total) or bool(row.isfinite().all())
        for total, row in zip(sums.tolist(), logits, strict=True)
    ]


def _wants_more(spec: SampleSpec) -> bool:
    return spec.sampling.temperature > 0 or spec.sampling.logprobs or spec.adjusts


def sample_group(logits: Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | NotSampled]:
    """Samples from rows of finite float64 logits, on any device; changes the logits."""
    logprobs = logits.log_softmax(dim=-1) if any(spec.sampling.logprobs for spec in specs) else None
    adjust(logits, specs)
    best, greedy = logits.max(dim=-1)
    token_ids: list[int] = greedy.tolist()
    left: list[bool] = (best > OUT).tolist()
    noisy = [row for row, spec in enumerate(specs) if left[row] and spec.sampling.temperature > 0]
    if noisy:
        chosen = [specs[row] for row in noisy]
        probabilities = _probabilities(logits[torch.tensor(noisy, device=logits.device)], chosen)
        noise = [uniform(spec.sampling.seed, spec.position) for spec in chosen]
        for row, token_id in zip(noisy, _pick(probabilities, noise), strict=True):
            token_ids[row] = token_id
    return [
        _told(token_ids[row], spec, None if logprobs is None else logprobs[row])
        if left[row]
        else NotSampled.NOTHING_LEFT
        for row, spec in enumerate(specs)
    ]


def _told(token_id: int, spec: SampleSpec, logprobs: Tensor | None) -> SampledToken:
    if logprobs is None or not spec.sampling.logprobs:
        return SampledToken(token_id, None)
    top = logprobs.topk(min(spec.sampling.top_logprobs, logprobs.numel()))
    return SampledToken(
        token_id,
        float(logprobs[token_id]),
        tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )


def _probabilities(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Probabilities after temperature, then top-k, top-p and min-p. [rows, vocab_size] -> the same,
    zero where filtered out.

    Tokens that tie with the k-th stay, so that no order among equals is made up.
    """
    temperatures = torch.tensor(
        [spec.sampling.temperature for spec in specs], dtype=logits.dtype, device=logits.device
    )
    # The largest logit becomes 0 first: dividing by a tiny temperature then overflows to -inf only.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperatures[:, None]
    _keep_top_k(scaled, specs)
    probabilities = scaled.softmax(dim=-1)
    for row, spec in enumerate(specs):
        if spec.sampling.top_p < 1:
            probabilities[row] = _nucleus(probabilities[row], spec.sampling.top_p)
    if any(spec.sampling.min_p for spec in specs):
        least = torch.tensor(
            [spec.sampling.min_p for spec in specs], dtype=logits.dtype, device=logits.device
        )[:, None]
        probabilities[probabilities < least * probabilities.max(dim=-1, keepdim=True).values] = 0
    return probabilities


def _keep_top_k(scaled: Tensor, specs: Sequence[SampleSpec]) -> None:
    rows = [row for row, spec in enumerate(specs) if 0 < spec.sampling.top_k < scaled.shape[1]]
    if rows:
        ks = torch.tensor([specs[row].sampling.top_k for row in rows], device=scaled.device)
        where = torch.tensor(rows, device=scaled.device)
        kth = scaled[where].topk(int(ks.max())).values.gather(1, ks[:, None] - 1)
        scaled[where] = scaled[where].masked_fill(scaled[where] < kth, OUT)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The fewest most probable tokens that have at least ``top_p`` together; among equals, lower
    ids come first. [n] -> [n].

    Tokens below (1 - top_p) / n have less than 1 - top_p together and so lie outside of it: only
    the rest, usually a few of a large vocabulary, is sorted.
    """
    candidates = (probabilities >= (1 - top_p) / probabilities.numel()).nonzero()[:, 0]
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    kept = int((ordered.cumsum(dim=0) - ordered < top_p).sum())
    nucleus = torch.zeros_like(probabilities)
    nucleus[candidates[order[:kept]]] = ordered[:kept]
    return nucleus


def _pick(probabilities: Tensor, noise: Sequence[float]) -> list[int]:
    """The token of each row in whose share of the cumulated probabilities the noise falls.

    They need not add up to 1.

    The shares lie in the order of ids, not of probabilities: rounding that swaps two nearly equal
    ones then moves no other share.
    """
    cumulated = probabilities.cumsum(dim=-1)
    points = (
        cumulated[:, -1:]
        * torch.tensor(noise, dtype=probabilities.dtype, device=probabilities.device)[:, None]
    )
    # right=True passes over tokens without a share; the product can round up to the total, which
    # belongs to the last one with a share.
    found = torch.searchsorted(cumulated, points, right=True)[:, 0]
    last = probabilities.shape[1] - 1 - (probabilities > 0).int().flip(-1).argmax(dim=-1)
    return torch.minimum(found, last).tolist()
