"""What captured steps read: words always in the same places, padded to the same lengths."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda.attention_metadata import (
    ALIGN_WORDS,
    NOWHERE,
    AttentionMetadata,
    Place,
    Words,
    fields_of,
    max_splits,
    metadata_of,
)
from pilotlight.engine.cuda.trials import trial_fields


class StaticWords:
    """Fields that always lie in the same places: what a captured step reads."""

    def __init__(self, capacities: Mapping[str, int], place: Place, *, pinned: bool) -> None:
        """Takes the memory.

        Args:
            capacities: the most words of each field. The last one may be longer than all others
                together, and goes only as far as it is filled.
            place: gives memory.
            pinned: words wait in pinned memory for their way to a device.
        """
        self.capacities = {
            name: -(-size // ALIGN_WORDS) * ALIGN_WORDS for name, size in capacities.items()
        }
        offsets = np.cumsum([0, *self.capacities.values()])[:-1].tolist()
        self._offsets: dict[str, int] = dict(zip(self.capacities, offsets, strict=True))
        self.words = place((sum(self.capacities.values()),), torch.int32)
        self._pinned = pinned
        self._last = list(self.capacities)[-1]

    def send(self, fields: Mapping[str, Words], nowhere: Collection[str]) -> bool:
        """Sends fields; what they do not fill is 0, or ``NOWHERE`` in the named ones.

        False, and nothing, if the last is too long.
        """
        last = fields[self._last]
        if len(last) > self.capacities[self._last]:
            return False
        host = torch.empty(
            self._offsets[self._last] + len(last), dtype=torch.int32, pin_memory=self._pinned
        )
        words = host.numpy()
        words[: self._offsets[self._last]] = 0
        for name in nowhere:
            words[self._offsets[name] : self._offsets[name] + self.capacities[name]] = NOWHERE
        for name, field in fields.items():
            words[self._offsets[name] : self._offsets[name] + len(field)] = field
        self.words[: len(words)].copy_(host, non_blocking=True)
        return True

    def views(self, lengths: Mapping[str, int]) -> dict[str, Tensor]:
        """The first words of fields."""
        return {
            name: self.words[self._offsets[name] : self._offsets[name] + length]
            for name, length in lengths.items()
        }


class StaticDecode:
    """The words of plain decode steps, always in the same places."""

    def __init__(
        self,
        place: Place,
        max_rows: int,
        spare: int,
        max_blocks: int,
        window_tokens: int | None,
        *,
        pinned: bool,
    ) -> None:
        """Takes the memory.

        Args:
            place: gives it.
            max_rows: the most rows of a step.
            spare: splits beyond one for each row, see ``split_keys``.
            max_blocks: the most entries of all block tables of a step together.
            window_tokens: of sliding layers; None if there are none.
            pinned: see ``StaticWords``.
        """
        kinds = ("full",) if window_tokens is None else ("full", "sliding")
        capacities: dict[str, int] = dict.fromkeys(
            ("positions", "slots", "first_blocks", "token_ids"), max_rows
        )
        for kind in kinds:
            capacities |= {f"{kind}_firsts": max_rows, f"{kind}_counts": max_rows}
            capacities |= {
                f"{kind}_{name}": max_splits(max_rows, spare)
                for name in ("rows", "starts", "stops")
            }
        capacities["blocks"] = max_blocks
        self.static = StaticWords(capacities, place, pinned=pinned)
        self._kinds: tuple[str, ...] = kinds
        self._nowhere = ("slots", *(f"{kind}_rows" for kind in kinds))
        self._spare = spare
        self._window_tokens = window_tokens

    def fill(self, batch: Batch, token_ids: Words | None) -> bool:
        """Sends a step's words; rows beyond the batch's are not used.

        False, and nothing, if its tables are too long.
        """
        fields = fields_of(batch, self._spare, self._window_tokens)
        del fields["logit_rows"]
        if token_ids is not None:
            fields["token_ids"] = token_ids
        return self.static.send(fields, self._nowhere)

    @contextmanager
    def trial(self, num_rows: int, vocab_size: int) -> Generator[None]:
        """Within it, the words are those of a trial; afterwards they are what they were."""
        before = self.static.words.clone()
        self.static.send(trial_fields(num_rows, self._kinds, vocab_size), self._nowhere)
        try:
            yield
        finally:
            self.static.words.copy_(before)

    def view(self, num_rows: int) -> tuple[AttentionMetadata, Tensor]:
        """A step of ``num_rows`` rows, padding included, and its token ids [num_rows] int32."""
        lengths: dict[str, int] = {}
        for name, capacity in self.static.capacities.items():
            of_splits = name.endswith(("_rows", "_starts", "_stops"))
            lengths[name] = (
                capacity
                if name == "blocks"
                else max_splits(num_rows, self._spare)
                if of_splits
                else num_rows
            )
        views = self.static.views(lengths)
        return metadata_of(views), views["token_ids"]
