"""The world while a tick changes it: books, and the indexes that follow from them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import replace

from pilotlight.policy.cluster import NodeFacts, WorkerFacts
from pilotlight.policy.coldstart.chosen import KnownStarts
from pilotlight.policy.coldstart.contention import INTO, FetchBooks, incoming
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.fetches import kept_up, newcomers
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.glance import Glances
from pilotlight.policy.control.growing import most_targets
from pilotlight.policy.control.index import Index, host_digests
from pilotlight.policy.control.known_room import KnownRoom, Needs
from pilotlight.policy.control.plan import ControlFacts, ControlRules
from pilotlight.policy.control.reconcile import Change, drain_of, moved
from pilotlight.policy.control.rooms import Slot, slot_of
from pilotlight.policy.control.shapes import LinkUse, Shape, is_usable
from pilotlight.policy.control.splitting import instances_of
from pilotlight.policy.estimates import estimates_of
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.placement import PlacementRules, committed_bytes, room_on
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain

NOTHING_PROMISED: Mapping[WorkerId, int] = {}


class Draft:
    """Books and indexes.

    ``moved`` has what was decided in this tick, which the books of the next one show.
    """

    def __init__(
        self, books: Books, facts: ControlFacts, index: Index, rules: ControlRules
    ) -> None:
        self.books = books
        self.facts = facts
        self.rules = rules
        self.index = index
        """As the last tick left it."""
        self.rooms, self.views, self.nodes = index.rooms, index.views, index.nodes
        self.copies, self.homes, self.holding = index.copies, index.homes, index.holding
        self.fetches = index.fetches
        """With those of the starts that this tick has decided."""
        self.moved: dict[InstanceId, Record] = {}
        self.drains: list[Drain] = []
        self.needs, self.glances = Needs(), Glances(facts.nodes)
        self._known_rooms: list[KnownRoom] = []
        self._unplaced: set[WorkerId] = set()
        """Workers with changes that their rooms do not show before ``hear``."""

    def kept(self) -> "Draft":
        """As it is now, to be looked at, whatever happens to this one. Nothing may happen to it."""
        one = copy(self)
        one._known_rooms = []
        return one

    # Changes.

    def move(self, changes: Iterable[Change], *, placed: bool = True) -> None:
        """Take changes for done. ``placed``: and bring rooms up to date; else ``hear`` does."""
        epoch, now_s = self.facts.term.epoch, self.facts.now_s
        news: dict[InstanceId, Record] = {}
        for change in changes:
            record = news.get(change.instance_id) or self.books.get(change.instance_id)
            if record is None or not record.is_row:
                continue
            before = record.instance
            after = replace(record, instance=moved(before, change, epoch, now_s))
            become = instances_of(before, change.become, epoch, now_s)
            for one in (after, *(Record(instance=one, model=record.model) for one in become)):
                news[one.instance.instance_id] = one
        self._put(news.values(), placed=placed)

    def drain(self, drains: Iterable[Drain]) -> None:
        """Take drains for done, but for those of instances that drain already."""
        fresh: dict[InstanceId, Drain] = {}
        for drain in drains:
            record = self.books.get(drain.instance_id)
            if (
                record is not None
                and record.is_row
                and record.instance.state is not InstanceState.DRAINING
            ):
                fresh.setdefault(drain.instance_id, drain)
        self.drains.extend(fresh.values())
        self.move(map(drain_of, fresh.values()))

    def put(self, *records: Record) -> None:
        """Take records in; what follows in this tick counts them."""
        self._put(records)

    def _put(self, records: Collection[Record], *, placed: bool = True) -> None:
        if not records:
            return
        known = self.books.records.among(one.instance.instance_id for one in records)
        self.books = self.books.put(*records)
        self.moved.update((one.instance.instance_id, one) for one in records)
        places = [placement for one in records for placement in one.instance.placements]
        if not placed:
            self._unplaced.update(one.worker_id for one in places)
            return
        begun = [one for one in records if one.tentative]
        linked = frozenset[WorkerId]()
        if self.rules.scheme.choice is not None:
            fetches = [each for one in begun for each in newcomers(one)]
            if fetches:
                linked = self._book(self.fetches.admit(fetches, self.facts.now_s))
        if len(begun) < len(records) or known:
            self.place({one.worker_id for one in places}, linked)
        else:
            promised = Counter[WorkerId]()
            for one in places:
                promised[one.worker_id] += one.device_bytes
            self.place((), linked, promised)

    def _book(self, fetches: FetchBooks) -> frozenset[WorkerId]:
        """With other books of fetches; the workers of the nodes whose links carry others now."""
        before, self.fetches = self.fetches.on, fetches
        links = {
            link for link in {*before, *fetches.on} if before.get(link) != fetches.on.get(link)
        }
        nodes = (NodeId(link.removeprefix(INTO)) for link in links if link.startswith(INTO))
        return frozenset(one for node_id in nodes for one in self.homes.to(node_id))

    @property
    def decided(self) -> Focus:
        """What was changed here."""
        instances = [one.instance for one in self.moved.values()]
        placements = [placement for one in instances for placement in one.placements]
        return Focus(
            models=frozenset(one.model for one in instances),
            instances=frozenset(self.moved),
            workers=frozenset(one.worker_id for one in placements),
            nodes=frozenset(one.node_id for one in placements),
        )

    def seen(self, instances: AbstractSet[InstanceId]) -> list[InstanceId]:
        """Those of some instances, and of what was changed here, that are in the books."""
        return sorted(one for one in instances | self.moved.keys() if one in self.books.records)

    # Indexes.

    @property
    def indexed(self) -> Index:
        """The index as it is now."""
        return replace(
            self.index,
            rooms=self.rooms,
            views=self.views,
            nodes=self.nodes,
            copies=self.copies,
            homes=self.homes,
            holding=self.holding,
        )

    def hear(
        self,
        workers: AbstractSet[WorkerId],
        nodes: AbstractSet[NodeId],
        instances: AbstractSet[InstanceId],
    ) -> None:
        """Bring the indexes, and the books of fetches, up to what was heard.

        Args:
            workers: Of which something was, or whose instances changed.
            nodes: The same.
            instances: Those that may have changed.
        """
        facts = self.facts
        told = {node_id: facts.nodes.get(node_id) for node_id in nodes}
        told = {key: one for key, one in told.items() if one is not self.nodes.find(key)}
        self.nodes = self.nodes.told(told)
        self.copies = self.copies.put({key: host_digests(one) for key, one in told.items()})
        views = {key: facts.workers.get(key) for key in workers}
        views = {key: one for key, one in views.items() if one is not self.views.find(key)}
        self.views = self.views.told(views)
        homes = {
            key: frozenset[NodeId]() if one is None else frozenset((one.facts.node_id,))
            for key, one in views.items()
        }
        held = {
            key: frozenset[ModelName]()
            if one is None
            else frozenset(stage.model for stage in one.facts.held)
            for key, one in views.items()
        }
        self.homes, self.holding = self.homes.put(homes), self.holding.put(held)
        heard = (one for name in sorted(nodes) if (one := facts.nodes.get(name)) is not None)
        linked = set[WorkerId]()
        if self.rules.scheme.choice is not None:
            before = facts.books.touched
            linked |= self._book(
                kept_up(self.fetches, self.books, before, instances, heard, facts.now_s)
            )
        elsewhere = {
            worker_id for node_id in nodes for worker_id in self.homes.to(node_id)
        }.difference(workers)
        usable = {
            one for one in nodes if (node := facts.nodes.get(one)) is not None and is_usable(node)
        }
        # Most reports of a node tell of copies alone, and leave its workers where they are.
        beside = {one for one in elsewhere if self._is_beside(one, usable)}
        self.place({*workers, *self._unplaced, *(elsewhere - beside)}, frozenset(linked | beside))

    def place(
        self,
        worker_ids: Iterable[WorkerId],
        linked: frozenset[WorkerId] = frozenset(),
        promised: Mapping[WorkerId, int] = NOTHING_PROMISED,
    ) -> None:
        """Bring the room of some workers up to date.

        Args:
            worker_ids: Of which anything may have changed.
            linked: Of which nothing has but what their node's link carries.
            promised: Of which nothing else has but that so much is promised to starts.
        """
        slots = self._linked(linked)
        for worker_id, size_bytes in promised.items():
            slot = slots.get(worker_id) or self.rooms.slots.find(worker_id)
            if slot is not None:
                slots[worker_id] = slot.with_promised(size_bytes)
        for worker_id in worker_ids:
            view = self.facts.workers.get(worker_id)
            if view is None:
                slots[worker_id] = None
                continue
            node = self.facts.nodes.get(view.facts.node_id)
            bare = not view.facts.held and worker_id not in self.books.by_worker
            here = None if bare else self._here(view.facts)
            slots[worker_id] = slot_of(
                view.facts, node, self._link(node), here, self.rules.scheme.placement
            )
        self.rooms = self.rooms.put(slots)
        for known in self._known_rooms:
            known.forget(slots)

    def _linked(self, worker_ids: Iterable[WorkerId]) -> dict[WorkerId, Slot | None]:
        """Workers' slots with their nodes' links as they are now, of those for which that changes
        something. Workers of a node are mostly of one shape, which is made once.
        """
        links: dict[NodeId, LinkUse] = {}
        shapes: dict[tuple[int, NodeId], Shape] = {}
        found: dict[WorkerId, Slot | None] = {}
        for worker_id in worker_ids:
            slot, view = self.rooms.slots.find(worker_id), self.facts.workers.get(worker_id)
            node = self.facts.nodes.get(view.facts.node_id) if view is not None else None
            if slot is None or slot.shape is None or node is None:
                continue
            if node.node_id not in links:
                links[node.node_id] = self._link(node)
            shape, link, key = slot.shape, links[node.node_id], (id(slot.shape), node.node_id)
            if key not in shapes:
                shapes[key] = shape if shape.fits(node, link) else shape.beside(node, link)
            if shapes[key] is not shape:
                found[worker_id] = replace(slot, shape=shapes[key])
        return found

    def known_room(self, rules: PlacementRules) -> KnownRoom:
        """What workers can give under some rules."""
        known = next((one for one in self._known_rooms if one.rules is rules), None)
        if known is None:
            known = KnownRoom(rules, self.room_on, lambda: self.rooms)
            self._known_rooms.append(known)
        return known

    def _is_beside(self, worker_id: WorkerId, usable: AbstractSet[NodeId]) -> bool:
        """Whether a report of a worker's node can change nothing there but its link and pool."""
        slot = self.rooms.slots.find(worker_id)
        return slot is not None and slot.shape is not None and self.homes.of(worker_id) <= usable

    def _link(self, node: NodeFacts | None) -> LinkUse:
        """What a choice will see of a node's link: with what is booked there and not reported
        yet, and with what it was found to give.
        """
        if node is None or self.rules.scheme.choice is None:
            return LinkUse(len(node.transfers) if node is not None else 0)
        booked = len(self.fetches.on.get(incoming(node.node_id), ()))
        slowness = self.facts.timings.slowness(node.node_id, node.nic_bytes_per_s)
        return LinkUse(max(booked, len(node.transfers)), slowness)

    def _here(self, worker: WorkerFacts) -> Snapshot:
        """One worker's instances and models, and nothing else."""
        ids = self.books.by_worker.get(worker.worker_id, ())
        return Snapshot(
            now_s=self.facts.now_s,
            epoch=self.facts.term.epoch,
            models=tuple(
                one
                for held in worker.held
                if (one := self.facts.models.get(held.model)) is not None
            ),
            instances=tuple(self.books.records[one].instance for one in ids),
        )

    def room_on(self, worker_id: WorkerId, rules: PlacementRules) -> int:
        """Device bytes that a worker can give now."""
        worker = self.facts.workers[worker_id].facts
        return room_on(worker, self._here(worker), rules)

    def free_on(self, worker_id: WorkerId) -> tuple[int, int]:
        """Device bytes of a worker that nothing has, and the granule of its memory; none of one
        that is not known.
        """
        view = self.facts.workers.get(worker_id)
        if view is None:
            return 0, 1
        device, here = view.facts.device, self._here(view.facts)
        free_bytes = device.memory_bytes - committed_bytes(view.facts, here)
        return max(0, free_bytes), device.granule_bytes

    def most_targets(self, instance: Instance) -> int:
        """See ``growing.most_targets``."""
        record = self.books.records[instance.instance_id]
        return most_targets(instance, record.model, self.free_on) if record.is_row else 1

    @property
    def known_starts(self) -> KnownStarts | None:
        """What a policy of ``coldstart`` knows; None where none is asked."""
        if self.rules.scheme.choice is None:
            return None
        return KnownStarts(timings=self.facts.timings, fetches=self.fetches)

    # Slices of the world.

    def slice(
        self,
        models: Iterable[ModelName] = (),
        workers: Iterable[WorkerId] = (),
        digest: Digest | None = None,
        demand: tuple[Demand, ...] = (),
    ) -> Snapshot:
        """A snapshot of a part of the world.

        Args:
            models: With all their instances.
            workers: With their nodes, instances, and the models that they hold.
            digest: With all nodes that have copies, and instances in the order in which they were
                planned.
            demand: As it is.
        """
        facts, books = self.facts, self.books
        asked, views = (
            set(models),
            [facts.workers[one].facts for one in sorted(set(workers)) if one in facts.workers],
        )
        planned = books.by_digest.get(digest, ()) if digest is not None else ()
        ids = {one for model in asked for one in books.by_model.get(model, ())}
        ids.update(one for worker in views for one in books.by_worker.get(worker.worker_id, ()))
        instances = [
            books.records[one].instance for one in (*planned, *sorted(ids.difference(planned)))
        ]
        named = (
            asked
            | {held.model for worker in views for held in worker.held}
            | {one.model for one in instances}
        )
        node_ids = {worker.node_id for worker in views}
        if digest is not None:
            node_ids |= self.copies.to(digest)
            node_ids.update(
                one.node_id for each in planned for one in books.records[each].instance.placements
            )
        return Snapshot(
            now_s=facts.now_s,
            epoch=facts.term.epoch,
            models=tuple(
                one for name in sorted(named) if (one := facts.models.get(name)) is not None
            ),
            nodes=tuple(
                one for node_id in sorted(node_ids) if (one := facts.nodes.get(node_id)) is not None
            ),
            workers=tuple(views),
            instances=tuple(instances),
            demand=demand,
            estimates=estimates_of(named, facts.estimates),
            arrivals=facts.arrivals.of(sorted(named)),
            drains=facts.drains,
        )

    def instances_of(self, model: ModelName) -> tuple[Instance, ...]:
        """All of a model, ended ones too."""
        return tuple(self.books.records[one].instance for one in self.books.by_model.get(model, ()))
