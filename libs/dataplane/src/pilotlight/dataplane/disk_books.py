"""Which chunks lie on a disk, whose they are, and which goes next. No I/O.

::

    order of the cache    the least important model first ... the most important last; what it does not name is before all
    models here           of equal importance, the least recently used goes first
    chunks of a model     the last used goes first: what is left is its beginning, which a start needs first

Without an order all models are equally important. A chunk that several models have belongs to the
one that used it last.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from pilotlight.policy.ids import Digest

NOBODY = Digest("")
"""Owns chunks of which it is not known whose they are: the least recently used goes first."""
_UNNAMED = -1


class DiskBooks:
    """One caller at a time."""

    def __init__(self) -> None:
        self.used_bytes = 0
        """What is there takes, and what is being written."""
        self._models: OrderedDict[Digest, OrderedDict[Digest, int]] = OrderedDict()
        """By model: what each of its chunks takes. The least recently used is first in both."""
        self._owners: dict[Digest, Digest] = {}
        self._ranks: dict[Digest, int] = {}

    def __contains__(self, chunk: Digest) -> bool:
        return chunk in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[Digest]:
        return iter(self._owners)

    def follow(self, order: Iterable[Digest]) -> None:
        """Take an order of models in the place of the last one, the least important first."""
        self._ranks = {model: rank for rank, model in enumerate(order)}

    def add(self, chunk: Digest, model: Digest, taken: int) -> None:
        """A chunk is there, with the bytes that were counted for it."""
        self._owners[chunk] = model
        self._models.setdefault(model, OrderedDict())[chunk] = taken
        self._models.move_to_end(model)

    def use(self, chunk: Digest, model: Digest | None = None) -> None:
        """A chunk was used, for a model if that is known; one that is not there is no error."""
        owner = self._owners.get(chunk)
        if owner is not None:
            self.add(chunk, owner if model is None else model, self._take(chunk, owner))

    def remove(self, chunk: Digest) -> bool:
        """A chunk has gone; whether it was there."""
        owner = self._owners.pop(chunk, None)
        if owner is None:
            return False
        self.used_bytes -= self._take(chunk, owner)
        return True

    def clear(self) -> None:
        """Nothing is there; the order stays."""
        self._models.clear()
        self._owners.clear()
        self.used_bytes = 0

    def gives_way_to(self, model: Digest) -> bool:
        """Whether what goes next may go for a model: not for one that is less important, nor for
        more of the same.
        """
        least = self._least()
        return (least != model or model == NOBODY) and self._rank(least) <= self._rank(model)

    def next(self) -> Digest:
        """The chunk that goes next."""
        least = self._least()
        chunks = self._models[least]
        return next(iter(chunks)) if least == NOBODY else next(reversed(chunks))

    def _least(self) -> Digest:
        return min(self._models, key=self._rank)

    def _rank(self, model: Digest) -> int:
        return self._ranks.get(model, _UNNAMED)

    def _take(self, chunk: Digest, owner: Digest) -> int:
        chunks = self._models[owner]
        taken = chunks.pop(chunk)
        if not chunks:
            del self._models[owner]
        return taken
