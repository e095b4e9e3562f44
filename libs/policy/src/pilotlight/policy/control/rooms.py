"""Workers by the room that they have, so that a placement looks at few of them.

A placement compares workers by what it predicts there, and by their ids. Workers of one *shape*
(device, link, transfers under way) differ by nothing but their room and id: of each shape the first
ids with enough room are enough, beside the workers that have copies of the model or failed to load
it. The policies then run over this shortlist and give the same answer as over all workers.

Room on a worker changes by itself as what it holds grows older (``placement.ServiceRules``, the
minimum residency). The index keeps what could be freed at best, and each search computes what can
be freed now.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import islice

from pilotlight.policy.cluster import HealthState, HeldState, NodeFacts, WorkerFacts
from pilotlight.policy.control.ordered import Ordered
from pilotlight.policy.control.shapes import LinkUse, Shape, links_of
from pilotlight.policy.control.table import Table
from pilotlight.policy.cost import known_rate
from pilotlight.policy.ids import InstanceId, ModelName, WorkerId
from pilotlight.policy.instance import SERVING
from pilotlight.policy.parallelism import Fleet, has_known_room
from pilotlight.policy.placement import (
    PlacementRules,
    committed_bytes,
    evictable_bytes,
    why_unusable,
)
from pilotlight.policy.plan import InstanceState, Snapshot


@dataclass(frozen=True, slots=True)
class Victim:
    """A busy instance on one worker that may be asked to make room there (``turns.plan_turns``)."""

    instance_id: InstanceId
    model: ModelName
    workers: tuple[WorkerId, ...]
    """All that it is on."""
    size_bytes: int
    """What it takes here."""
    since_s: float
    """Since when it serves."""
    owed_s: float
    """How long it may serve before it makes room."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker in the index."""

    shape: Shape | None
    """None: nothing can be placed on it."""
    free_bytes: int
    """Neither held nor promised."""
    at_best_bytes: int
    """With what eviction could free if everything idle had been so for long."""
    size: tuple[int, int] | None
    """Granule and memory of its device; None: nothing is known of what it could hold."""
    leaving: bool
    """An instance on it drains."""
    victims: tuple[Victim, ...] = ()
    most_bytes: int = 0
    """At best, with what all victims could free."""

    @property
    def place(self) -> tuple[Shape | None, int, int]:
        """Where it stands on the shelves."""
        return self.shape, self.free_bytes, self.at_best_bytes

    @property
    def is_evictable(self) -> bool:
        """Eviction may free something."""
        return self.at_best_bytes > self.free_bytes

    def with_promised(self, size_bytes: int) -> "Slot":
        """When so much has been promised to starts, and nothing else has changed."""
        return replace(
            self,
            free_bytes=self.free_bytes - size_bytes,
            at_best_bytes=self.at_best_bytes - size_bytes,
            most_bytes=self.most_bytes - size_bytes,
        )


def slot_of(
    worker: WorkerFacts,
    node: NodeFacts | None,
    link: LinkUse,
    here: Snapshot | None,
    rules: PlacementRules,
) -> Slot:
    """Where a worker belongs.

    Args:
        worker: What is known of it.
        node: Its node, if that is known.
        link: The node's link.
        here: Its instances, and the models that it holds; of all others nothing. None: there are
            none.
        rules: How workers are chosen.
    """
    memory_bytes = worker.device.memory_bytes
    shape = None
    if node is not None and why_unusable(worker, node) is None:
        rate, degraded = (
            known_rate(worker.device.load_bytes_per_s),
            worker.health.state is HealthState.DEGRADED,
        )
        reads = known_rate(worker.device.memory_bytes_per_s)
        shape = Shape(
            worker.device.kind,
            rate,
            reads,
            worker.device.granule_bytes,
            degraded,
            *links_of(node, link),
        )
    instances = here.instances if here is not None else ()
    free_bytes = at_best_bytes = memory_bytes
    if here is not None:
        free_bytes -= committed_bytes(worker, here)
        at_best_bytes = free_bytes + evictable_bytes(worker, replace(here, now_s=math.inf), rules)
    victims = _victims(worker, here, rules) if shape is not None and here is not None else ()
    return Slot(
        shape=shape,
        free_bytes=free_bytes,
        at_best_bytes=at_best_bytes,
        size=(worker.device.granule_bytes, memory_bytes) if has_known_room(worker) else None,
        leaving=any(one.state is InstanceState.DRAINING for one in instances),
        victims=victims,
        most_bytes=at_best_bytes + sum(one.size_bytes for one in victims),
    )


def _victims(worker: WorkerFacts, here: Snapshot, rules: PlacementRules) -> tuple[Victim, ...]:
    """Instances that ``turns.plan_turns`` may choose once they have served what they are owed."""
    held = {one.instance_id: one for one in worker.held}
    may_go = {one.name for one in here.models if not one.pinned}
    return tuple(
        Victim(
            instance_id=one.instance_id,
            model=one.model,
            workers=tuple(placement.worker_id for placement in one.placements),
            size_bytes=held[one.instance_id].device_bytes,
            since_s=one.state_since_s,
            owed_s=rules.service.owed_s(one),
        )
        for one in here.instances
        if one.state in SERVING
        and one.in_flight > 0
        and one.model in may_go
        and one.instance_id in held
        and held[one.instance_id].state is HeldState.READY
    )


def _level(size_bytes: int) -> int:
    """Eight buckets for each power of two."""
    if size_bytes < 8:
        return max(0, size_bytes)
    bits = size_bytes.bit_length()
    return (bits << 3) | ((size_bytes >> (bits - 4)) & 7)


NOBODY = Ordered[WorkerId]()
Entry = tuple[int, WorkerId, int]
"""What a worker can give, its id, and what is free there without that."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Workers of one shape by a number of bytes."""

    ranked: Ordered[tuple[int, WorkerId]] = field(default_factory=Ordered[tuple[int, WorkerId]])
    """The least bytes first."""
    levels: Mapping[tuple[int, int], Ordered[WorkerId]] = field(
        default_factory=dict[tuple[int, int], Ordered[WorkerId]]
    )
    """By the ``_level`` of what they can give and of what is free."""

    def moved(self, gone: Sequence[Entry], come: Sequence[Entry]) -> "Shelf":
        """After some workers' bytes have changed."""
        if not gone and not come:
            return self
        changes = defaultdict[tuple[int, int], tuple[list[WorkerId], list[WorkerId]]](
            lambda: ([], [])
        )
        for size_bytes, worker_id, free_bytes in gone:
            changes[_level(size_bytes), _level(free_bytes)][0].append(worker_id)
        for size_bytes, worker_id, free_bytes in come:
            changes[_level(size_bytes), _level(free_bytes)][1].append(worker_id)
        levels = dict(self.levels)
        for level, (left, joined) in changes.items():
            levels[level] = levels.get(level, NOBODY).changed(left, joined)
            if not levels[level]:
                del levels[level]
        ranked = self.ranked.changed([one[:2] for one in gone], [one[:2] for one in come])
        return Shelf(ranked, levels)

    def at_least(self, size_bytes: int) -> Iterator[Iterator[WorkerId]]:
        """Buckets of workers that may have a number of bytes, each in the order of ids.

        Those of the lowest may have less.
        """
        least = _level(size_bytes)
        return (iter(ids) for (level, _), ids in self.levels.items() if level >= least)

    def makeable(self, size_bytes: int) -> Iterator[Iterator[WorkerId]]:
        """The same, without those on which so much is surely free already."""
        least = _level(size_bytes)
        return (iter(ids) for (level, free), ids in self.levels.items() if free <= least <= level)


@dataclass(frozen=True, slots=True)
class Shelves:
    """Workers of one shape."""

    free: Shelf = field(default_factory=Shelf)
    """By what is free."""
    evictable: Shelf = field(default_factory=Shelf)
    """Those on which eviction frees something, by what they can give at best."""


Exact = Callable[[WorkerId], int]
"""Bytes that a worker can give now, with what eviction frees at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """The index. Immutable: a change copies what it touches."""

    slots: Table[WorkerId, Slot] = field(default_factory=Table["WorkerId", Slot])
    shapes: Mapping[Shape, Shelves] = field(default_factory=dict[Shape, Shelves])
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """How many workers have devices of each size."""
    busy: frozenset[WorkerId] = frozenset()
    """With instances that may be asked to make room."""
    leaving: frozenset[WorkerId] = frozenset()

    def put(self, changes: Mapping[WorkerId, Slot | None]) -> "Rooms":
        """With new slots for some workers; None: it is gone."""
        news = {key: slot for key, slot in changes.items() if self.slots.find(key) != slot}
        if not news:
            return self
        slots = self.slots.put(
            {key: slot for key, slot in news.items() if slot is not None},
            [key for key, slot in news.items() if slot is None],
        )
        sizes, shapes = Counter[tuple[int, int]](), dict(self.shapes)
        gone: dict[Shape, list[WorkerId]] = {}
        come: dict[Shape, list[WorkerId]] = {}
        for worker_id, slot in news.items():
            before = self.slots.find(worker_id)
            was, now = (one.size if one is not None else None for one in (before, slot))
            if was != now:
                sizes.update(
                    {size: more for size, more in ((was, -1), (now, 1)) if size is not None}
                )
            if before is not None and slot is not None and before.place == slot.place:
                continue
            if before is not None and before.shape is not None:
                gone.setdefault(before.shape, []).append(worker_id)
            if slot is not None and slot.shape is not None:
                come.setdefault(slot.shape, []).append(worker_id)
        for shape in {*gone, *come}:
            known = shapes.get(shape, Shelves())
            left, joined = (
                [(self.slots[one], one) for one in gone.get(shape, ())],
                [(slots[one], one) for one in come.get(shape, ())],
            )
            shelves = Shelves(
                free=known.free.moved(
                    [(old.free_bytes, one, old.free_bytes) for old, one in left],
                    [(new.free_bytes, one, new.free_bytes) for new, one in joined],
                ),
                evictable=known.evictable.moved(
                    [
                        (old.at_best_bytes, one, old.free_bytes)
                        for old, one in left
                        if old.is_evictable
                    ],
                    [
                        (new.at_best_bytes, one, new.free_bytes)
                        for new, one in joined
                        if new.is_evictable
                    ],
                ),
            )
            if shelves.free.ranked:
                shapes[shape] = shelves
            else:
                shapes.pop(shape, None)
        return Rooms(
            slots=slots,
            shapes=shapes,
            sizes=_counted(self.sizes, sizes) if sizes else self.sizes,
            busy=_flagged(self.busy, news, lambda slot: bool(slot.victims)),
            leaving=_flagged(self.leaving, news, lambda slot: slot.leaving),
        )

    @property
    def fleet(self) -> Fleet:
        """What a refusal says of all workers."""
        return Fleet(workers=len(self.slots), sizes=self.sizes)

    def first(
        self,
        shape: Shape,
        least_bytes: int,
        skipped: AbstractSet[WorkerId],
        exact: Exact | None,
        count: int,
    ) -> tuple[WorkerId, ...]:
        """The first ``count`` ids of the workers of a shape on which room is free, and of those on
        which it can be made.

        Args:
            shape: Of the workers.
            least_bytes: What they must be able to give.
            skipped: Workers that do not count.
            exact: What a worker can give now; None: those where room is free alone.
            count: Of each kind.
        """
        shelves = self.shapes[shape]

        def is_free(worker_id: WorkerId) -> bool:
            return worker_id not in skipped and self.slots[worker_id].free_bytes >= least_bytes

        def can_be_made(worker_id: WorkerId) -> bool:
            slot = self.slots[worker_id]
            if exact is None or worker_id in skipped:
                return False
            has = slot.free_bytes < least_bytes <= slot.at_best_bytes
            return has and exact(worker_id) >= least_bytes

        free = heapq.merge(
            *(islice(filter(is_free, ids), count) for ids in shelves.free.at_least(least_bytes))
        )
        if exact is None:
            return tuple(islice(free, count))
        made = heapq.merge(
            *(
                islice(filter(can_be_made, ids), count)
                for ids in shelves.evictable.makeable(least_bytes)
            )
        )
        return (*islice(free, count), *islice(made, count))

    def roomiest(self, shape: Shape, exact: Exact, count: int) -> tuple[WorkerId, ...]:
        """The ``count`` workers of a shape that can give the most now; of equal ones the last ids.

        ``exact`` is asked for a worker only where what it could give at best is still of interest.
        """
        best: list[tuple[int, WorkerId]] = []
        shelves = self.shapes[shape]
        for at_best_bytes, worker_id in heapq.merge(
            reversed(shelves.free.ranked), reversed(shelves.evictable.ranked), reverse=True
        ):
            if len(best) == count and (at_best_bytes, worker_id) <= best[0]:
                break
            slot = self.slots[worker_id]
            if slot.is_evictable and at_best_bytes == slot.free_bytes:
                continue
            size_bytes = exact(worker_id) if slot.is_evictable else at_best_bytes
            if len(best) < count:
                heapq.heappush(best, (size_bytes, worker_id))
            else:
                heapq.heappushpop(best, (size_bytes, worker_id))
        return tuple(worker_id for _, worker_id in best)


def _counted(
    before: Mapping[tuple[int, int], int], more: Counter[tuple[int, int]]
) -> Mapping[tuple[int, int], int]:
    counts = Counter(before)
    counts.update(more)
    return {size: count for size, count in counts.items() if count}


def _flagged(
    before: frozenset[WorkerId], news: Mapping[WorkerId, Slot | None], flag: Callable[[Slot], bool]
) -> frozenset[WorkerId]:
    now = frozenset(
        worker_id for worker_id, slot in news.items() if slot is not None and flag(slot)
    )
    then = before & news.keys()
    return before if now == then else (before - then) | now
