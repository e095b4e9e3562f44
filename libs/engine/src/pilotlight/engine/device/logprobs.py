"""Log probabilities of simple rows, on the device that has the logits and without waiting for it:
a request that asks for them is sampled as far ahead of the host as any other.

``device.sampler`` gives the same for all other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.sampler import ROWS_AT_ONCE, NotSampled, SampledToken


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows that ask for them. Tensors lie wherever they were computed, or ``moved`` to."""

    rows: tuple[int, ...]
    """Of the batch."""
    wanted: tuple[int, ...]
    """How many of the most probable tokens each row asks for."""
    chosen: Tensor
    """Of the tokens that were sampled: [rows] float64."""
    top_ids: Tensor
    """The most probable tokens, and their log probabilities: [rows, most that a row asks for]."""
    top: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Logprobs":
        """The same, elsewhere."""
        return replace(
            self, chosen=move(self.chosen), top_ids=move(self.top_ids), top=move(self.top)
        )

    def added_to(
        self, sampled: Sequence[SampledToken | NotSampled]
    ) -> list[SampledToken | NotSampled]:
        """The batch's tokens with them; the tensors are on the host, and filled."""
        told = list(sampled)
        chosen, ids, top = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        for index, (row, wanted) in enumerate(zip(self.rows, self.wanted, strict=True)):
            token = told[row]
            if isinstance(token, SampledToken):
                best = tuple(zip(ids[index][:wanted], top[index][:wanted], strict=True))
                told[row] = SampledToken(token.token_id, chosen[index], best)
        return told


def logprobs_of(logits: Tensor, chosen: Tensor, specs: Sequence[SampleSpec]) -> Logprobs | None:
    """Log probabilities before anything is done to the logits; None if no simple row asks for them.

    Args:
        logits: [len(specs), vocab_size].
        chosen: the sampled tokens, [len(specs)]; negative where there is none.
        specs: how the rows are sampled.
    """
    rows = [row for row, spec in enumerate(specs) if spec.simple and spec.sampling.logprobs]
    if not rows:
        return None
    vocab_size = logits.shape[1]
    wanted = [min(specs[row].sampling.top_logprobs, vocab_size) for row in rows]
    if len(rows) < len(specs):
        places = torch.tensor(rows).to(logits.device, non_blocking=True)
        logits, chosen = logits.index_select(0, places), chosen.index_select(0, places)
    parts = [
        of_some(logits[start:stop], chosen[start:stop], max(wanted))
        for start in range(0, len(rows), ROWS_AT_ONCE)
        for stop in (start + ROWS_AT_ONCE,)
    ]
    return Logprobs(
        tuple(rows), tuple(wanted), *(torch.cat(each) for each in zip(*parts, strict=True))
    )


def of_some(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """As in ``Logprobs``: of the chosen tokens, and ids and values of the most probable ones."""
    total = logits.double().logsumexp(dim=-1, keepdim=True)
    places = chosen.clamp_min(0).long()[:, None]
    of_chosen = logits.gather(1, places).double() - total
    top = logits.topk(most, dim=-1)
    return of_chosen[:, 0], top.indices, top.values.double() - total
