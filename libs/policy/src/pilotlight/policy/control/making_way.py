"""Workers among which busy instances make room for models that have waited for too long: rule 4 of
``turns.plan_turns``.

That rule takes the worker where the fewest victims are enough, and of several the one whose victims
are the least important. Here all busy workers are ranked in the same way, from what the index keeps
of their victims. The policy then compares the first ones: as many as the models in the line could
take from each other, and one more. The index knows bounds of a worker's room, so a worker is among
the first if it is so by its lower bound.
"""

import bisect
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate

from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.rooms import Slot, Victim
from pilotlight.policy.control.shapes import Shape
from pilotlight.policy.ids import InstanceId, ModelName, WorkerId
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Model

Importance = tuple[bool, float, InstanceId]
"""As ``turns`` orders instances: others of its model serve too, then since when it serves."""
Rank = tuple[int, Importance]
"""How many victims, and the most important of them: the least comes first."""
LAST: Rank = 1 << 30, (True, 0.0, InstanceId(""))


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A worker, by the victims on it that may go now."""

    worker_id: WorkerId
    slot: Slot
    importances: tuple[Importance, ...]
    """Of the victims that leave their models enough, the least first."""
    freed_bytes: tuple[int, ...]
    """By the first of these, the first two, and so on."""

    def rank(self, missing_bytes: int) -> Rank:
        """What is to go for a number of bytes: one at least, where this is asked at all."""
        found = (
            at for at, freed_bytes in enumerate(self.freed_bytes) if freed_bytes >= missing_bytes
        )
        last = next(found, None)
        return LAST if last is None else (last + 1, self.importances[last])


def making_way(asking: Sequence[Model], draft: Draft, claims: int) -> frozenset[WorkerId]:
    """Workers among which the places for models are, and all others that their victims are on.

    1. those on which no victim has served for what it is owed, or all together are not enough, are
       none
    2. the first ones of the others; models of about the same size are ranked together, by bounds
       that hold for all of them
    3. where several models ask, the victims of one change the importance of other instances of
       their models: all workers of these are compared, too, and do not count among the first ones

    Args:
        asking: Models that have waited for longer than their patience.
        draft: The world.
        claims: How many models may take workers from each other.
    """
    if not asking:
        return frozenset()
    line = _Line(asking, draft)
    groups = defaultdict[int, list[Model]](list)
    for model in asking:
        groups[draft.needs.of(model, 1).bit_length()].append(model)
    # What leaves already counts there, and its other victims may span workers: always compared.
    listed = frozenset(draft.rooms.leaving & line.ready.keys())
    while True:
        first = [
            one
            for models in groups.values()
            for one in _first(line, models, draft, claims + 1, listed)
        ]  # 2
        chosen = listed.union(one.worker_id for one in first)
        victims = [victim for one in chosen for victim in line.ready.get(one, ())]
        changed = (
            line.changed_by(victims, len(asking)) if len(asking) > 1 else frozenset[WorkerId]()
        )  # 3
        if changed <= listed:
            return chosen.union(worker_id for victim in victims for worker_id in victim.workers)
        listed |= changed


class _Line:
    """Workers that could be a place for the smallest of some models, those of the least important
    victims first.
    """

    def __init__(self, asking: Sequence[Model], draft: Draft) -> None:
        books = draft.books
        keys = (key for drain in draft.facts.drains for key in books.by_node.get(drain.node_id, ()))
        # Instances on nodes that drain take no part.
        self._leaving = {
            key for key in keys if books.records[key].instance.state in STARTING | SERVING
        }
        self._draft = draft
        self._spare: dict[ModelName, int] = {}
        self._known: list[tuple[Importance, _Ranked]] = []
        self.ready = dict(self._ready(asking))
        """Workers, and their victims that may go now."""
        self._behind = [
            (min(self._least(one) for one in victims), worker_id, victims)
            for worker_id, victims in self.ready.items()
        ]
        heapq.heapify(self._behind)

    def __iter__(self) -> Iterator[tuple[Importance, _Ranked]]:
        """Each with what its victims are not less important than."""
        at = 0
        while at < len(self._known) or self._behind:
            if at == len(self._known):
                least, worker_id, victims = heapq.heappop(self._behind)
                self._known.append((least, self._ranked(worker_id, victims)))
            yield self._known[at]
            at += 1

    def changed_by(self, victims: Iterable[Victim], asking: int) -> frozenset[WorkerId]:
        """Workers of which something else may be said when some of these victims go, for ``asking``
        models.
        """
        books = self._draft.books
        most = asking * max(map(len, self.ready.values()), default=0)
        models = {
            one.model for one in victims if len(one.workers) > 1 or self._is_shared(one, most)
        }
        keys = (key for model in models for key in books.by_model[model])
        return frozenset(
            place.worker_id for key in keys for place in books.records[key].instance.placements
        )

    def _ready(self, asking: Sequence[Model]) -> Iterator[tuple[WorkerId, tuple[Victim, ...]]]:
        draft, now_s = self._draft, self._draft.facts.now_s
        slots, least = draft.rooms.slots, dict[int, int]()
        for worker_id in draft.rooms.busy:  # 1
            slot = slots[worker_id]
            if slot.shape is None:
                continue
            granule_bytes = slot.shape.granule_bytes
            if granule_bytes not in least:
                least[granule_bytes] = min(draft.needs.of(model, granule_bytes) for model in asking)
            if slot.most_bytes < least[granule_bytes] and not slot.leaving:
                continue
            victims = [one for one in slot.victims if now_s - one.since_s >= one.owed_s]
            if self._leaving:
                victims = [one for one in victims if one.instance_id not in self._leaving]
            if victims:
                yield worker_id, tuple(victims)

    def _least(self, victim: Victim) -> Importance:
        """A bound that costs no count."""
        return len(self._draft.books.by_model[victim.model]) < 2, victim.since_s, victim.instance_id

    def _ranked(self, worker_id: WorkerId, victims: tuple[Victim, ...]) -> _Ranked:
        taken = Counter[ModelName]()
        going: list[tuple[Importance, int]] = []
        by_importance = {
            (self._spare_of(one.model) <= 1, one.since_s, one.instance_id): one for one in victims
        }
        for importance, one in sorted(by_importance.items()):
            if self._spare_of(one.model) > taken[one.model]:
                taken[one.model] += 1
                going.append((importance, one.size_bytes))
        return _Ranked(
            worker_id,
            self._draft.rooms.slots[worker_id],
            tuple(importance for importance, _ in going),
            tuple(accumulate(size_bytes for _, size_bytes in going)),
        )

    def _is_shared(self, victim: Victim, most: int) -> bool:
        """Whether others of its model are worth more, or may not go, when up to ``most`` instances
        have gone.
        """
        return not self._least(victim)[0] and self._spare_of(victim.model) <= most + 1

    def _spare_of(self, model: ModelName) -> int:
        """How many instances of a model could go, as ``turns.plan_turns`` counts them."""
        if model not in self._spare:
            books = self._draft.books
            keys = (key for key in books.by_model.get(model, ()) if key not in self._leaving)
            serving = sum(books.records[key].instance.state in SERVING for key in keys)
            self._spare[model] = serving - self._draft.facts.models[model].scaling.min_instances
        return self._spare[model]


def _first(
    line: _Line, models: Sequence[Model], draft: Draft, count: int, listed: AbstractSet[WorkerId]
) -> list[_Ranked]:
    """Those that could be among the first ``count`` for one of some models.

    Args:
        line: Busy workers.
        models: Of about one size.
        draft: The world.
        count: How many are wanted.
        listed: Workers that are compared in any case, and do not count.
    """
    known: dict[int, tuple[int, int]] = {}
    fits: dict[Shape, bool] = {}
    bounds: list[tuple[Rank, WorkerId]] = []
    found: list[tuple[Rank, WorkerId, _Ranked]] = []
    for least, one in line:
        if len(bounds) == count and bounds[-1][0] < (1, least):
            break
        if one.worker_id in listed:
            continue
        slot, shape = one.slot, one.slot.shape
        assert shape is not None
        if shape.granule_bytes not in known:
            each = [draft.needs.of(model, shape.granule_bytes) for model in models]
            known[shape.granule_bytes] = min(each), max(each)
        if shape not in fits:
            fits[shape] = all(map(shape.pool_holds, models))
        least_bytes, most_bytes = known[shape.granule_bytes]
        at_least = one.rank(least_bytes - slot.at_best_bytes)
        if at_least == LAST:
            continue
        found.append((at_least, one.worker_id, one))
        at_most = one.rank(most_bytes - slot.free_bytes)
        if fits[shape] and at_most != LAST:
            bisect.insort(bounds, (at_most, one.worker_id))
            del bounds[count:]
    if len(bounds) < count:
        return [one for _, _, one in found]
    return [one for rank, worker_id, one in found if (rank, worker_id) <= bounds[-1]]
