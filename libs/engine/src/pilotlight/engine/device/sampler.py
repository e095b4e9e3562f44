"""From logits to tokens, without state: seed, position and logits say all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.engine.core.philox import uniform
from pilotlight.policy.types import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row of logits is to be drawn from."""

    sampling: Sampling
    position: int
    """The output position that is drawn: the counter of its noise."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The chosen token."""

    token_id: int
    logprob: float | None
    """Natural logarithm of its probability before temperature and filters, if asked for."""


@torch.inference_mode()
def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn | None]:
    """Draws one token from each row of logits [len(draws), vocab_size]; None where a row is not finite throughout."""
    usable: list[bool] = logits.isfinite().all(dim=-1).tolist()
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    drawn: list[Drawn | None] = []
    for row, draw in enumerate(draws):
        if not usable[row]:
            drawn.append(None)
            continue
        token_id = greedy[row]
        if draw.sampling.temperature > 0:
            token_id = _pick(_distribution(logits[row], draw.sampling), uniform(draw.sampling.seed, draw.position))
        logprob = float(logits[row].double().log_softmax(dim=-1)[token_id]) if draw.sampling.logprobs else None
        drawn.append(Drawn(token_id, logprob))
    return drawn


def _distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after temperature, then top-k, then top-p. [vocab_size] -> [vocab_size], float64, zero where filtered out.

    Tokens that tie with the k-th stay, so that no order among equals is made up.
    """
    # The largest logit becomes 0 first: dividing by a tiny temperature then overflows to -inf only.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    return _nucleus(probabilities, sampling.top_p) if sampling.top_p < 1 else probabilities


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The fewest most probable tokens that have at least ``top_p`` together; among equals, lower ids come first. [n] -> [n].

    Tokens below (1 - top_p) / n have less than 1 - top_p together and so lie outside of it: only the rest, usually a few of a
    large vocabulary, is sorted.
    """
    candidates = (probabilities >= (1 - top_p) / probabilities.numel()).nonzero()[:, 0]
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    kept = int((ordered.cumsum(dim=0) - ordered < top_p).sum())
    nucleus = torch.zeros_like(probabilities)
    nucleus[candidates[order[:kept]]] = ordered[:kept]
    return nucleus


def _pick(probabilities: Tensor, noise: float) -> int:
    """The token in whose share of the cumulated probabilities the noise falls. They need not add up to 1.

    The shares lie in the order of ids, not of probabilities: rounding that swaps two nearly equal ones then moves no other share.
    """
    cumulated = probabilities.cumsum(dim=0)
    point = cumulated[-1] * noise
    # right=True passes over tokens without a share; the product can round up to the total, which belongs to the last one with a
    # share.
    token_id = int(torch.searchsorted(cumulated, point, right=True))
    return min(token_id, int(probabilities.nonzero()[-1]))
