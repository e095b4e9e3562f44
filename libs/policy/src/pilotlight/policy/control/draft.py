"""The world while a tick changes it: books, and the indexes that follow from them."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from pilotlight.policy.cluster import NodeFacts, Tier, WorkerFacts
from pilotlight.policy.coldstart.chosen import KnownStarts
from pilotlight.policy.coldstart.contention import INTO, FetchBooks, incoming
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.fetches import kept_up, newcomers
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.growing import most_targets
from pilotlight.policy.control.index import Index
from pilotlight.policy.control.plan import ControlFacts, ControlRules
from pilotlight.policy.control.reconcile import Change, drain_of, moved
from pilotlight.policy.control.rooms import Slot, slot_of
from pilotlight.policy.control.shapes import LinkUse, Shape
from pilotlight.policy.control.splitting import instances_of
from pilotlight.policy.cost import stage_room
from pilotlight.policy.estimates import estimates_of
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.placement import PlacementRules, committed_bytes, room_on
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain


class Needs:
    """The least device bytes with which models are worth loading.

    Devices that count alike are asked once.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[ModelName, int], int] = {}

    def of(self, model: Model, granule_bytes: int) -> int:
        """Of one model."""
        key = model.name, granule_bytes
        if key not in self._known:
            self._known[key] = stage_room(model, model.spec.whole, granule_bytes).least_bytes
        return self._known[key]


class KnownRoom:
    """What workers can give now, each looked at once until something changes there."""

    def __init__(self, draft: "Draft", rules: PlacementRules) -> None:
        self.rules = rules
        self._draft = draft
        self._known: dict[WorkerId, int] = {}
        self._most: dict[Shape, int] = {}

    def __call__(self, worker_id: WorkerId) -> int:
        """Bytes of one worker."""
        if worker_id not in self._known:
            self._known[worker_id] = self._draft.room_on(worker_id, self.rules)
        return self._known[worker_id]

    def most(self, shape: Shape) -> int:
        """Bytes of the roomiest worker of a shape."""
        if shape not in self._most:
            self._most[shape] = max(
                map(self, self._draft.rooms.roomiest(shape, self, 1)), default=0
            )
        return self._most[shape]

    def forget(self, worker_ids: Iterable[WorkerId]) -> None:
        """Something has changed on these."""
        self._most.clear()
        for worker_id in worker_ids:
            self._known.pop(worker_id, None)


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
        self.rooms, self.copies, self.homes, self.holding = (
            index.rooms,
            index.copies,
            index.homes,
            index.holding,
        )
        self.fetches = index.fetches
        """With those of the starts that this tick has decided."""
        self.moved: dict[InstanceId, Record] = {}
        self.drains: list[Drain] = []
        self.needs = Needs()
        self._known_rooms: list[KnownRoom] = []

    # Changes.

    def move(self, changes: Iterable[Change]) -> None:
        """Take changes for done."""
        facts = self.facts
        found = ((change, self.books.get(change.instance_id)) for change in changes)
        for change, record in found:
            if record is None or not record.is_row:
                continue
            before, epoch = record.instance, facts.term.epoch
            after = replace(record, instance=moved(before, change, epoch, facts.now_s))
            become = instances_of(before, change.become, epoch, facts.now_s)
            self.put(after, *(Record(instance=one, model=record.model) for one in become))

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
        if not records:
            return
        self.books = self.books.put(*records)
        self.moved.update((one.instance.instance_id, one) for one in records)
        linked = frozenset[WorkerId]()
        if self.rules.scheme.choice is not None:
            begun = [one for record in records if record.tentative for one in newcomers(record)]
            if begun:
                linked = self._book(self.fetches.admit(begun, self.facts.now_s))
        self.place(
            {placement.worker_id for one in records for placement in one.instance.placements},
            linked,
        )

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
            self.index, rooms=self.rooms, copies=self.copies, homes=self.homes, holding=self.holding
        )

    def hear(self, workers: AbstractSet[WorkerId], nodes: AbstractSet[NodeId]) -> None:
        """Bring the indexes up to what was heard of some workers and nodes."""
        facts = self.facts
        self.copies = self.copies.put(
            {node_id: _host_digests(facts.nodes.get(node_id)) for node_id in nodes}
        )
        views = {worker_id: facts.workers.get(worker_id) for worker_id in workers}
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
        elsewhere = (
            worker_id
            for node_id in nodes
            for worker_id in self.homes.to(node_id)
            if worker_id not in workers
        )
        self.place({*workers, *(one for one in elsewhere if not self._is_where_it_was(one))})

    def follow_fetches(
        self, instances: AbstractSet[InstanceId], nodes: AbstractSet[NodeId]
    ) -> None:
        """Bring the books of fetches up to what was heard, where a policy asks for them."""
        if self.rules.scheme.choice is None:
            return
        facts = self.facts
        heard = (one for name in sorted(nodes) if (one := facts.nodes.get(name)) is not None)
        linked = self._book(
            kept_up(self.fetches, self.books, facts.books.touched, instances, heard, facts.now_s)
        )
        self.place((), linked)

    def place(
        self, worker_ids: Iterable[WorkerId], linked: frozenset[WorkerId] = frozenset()
    ) -> None:
        """Bring the room of some workers up to date; of those that are ``linked`` nothing has
        changed but what their node's link carries.
        """
        slots: dict[WorkerId, Slot | None] = {
            one: slot for one in linked if (slot := self._linked(one)) is not None
        }
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

    def _linked(self, worker_id: WorkerId) -> Slot | None:
        """A worker's slot with its node's link as it is now; None where that changes nothing."""
        slot, view = self.rooms.slots.find(worker_id), self.facts.workers.get(worker_id)
        node = self.facts.nodes.get(view.facts.node_id) if view is not None else None
        if slot is None or slot.shape is None or node is None:
            return None
        link = self._link(node)
        if slot.shape.fits(node, link):
            return None
        return replace(slot, shape=slot.shape.beside(node, link))

    def known_room(self, rules: PlacementRules) -> KnownRoom:
        """What workers can give under some rules."""
        known = next((one for one in self._known_rooms if one.rules is rules), None)
        if known is None:
            known = KnownRoom(self, rules)
            self._known_rooms.append(known)
        return known

    def _is_where_it_was(self, worker_id: WorkerId) -> bool:
        """Whether a report of its node leaves a worker in its place: most tell of copies alone."""
        slot, node = (
            self.rooms.slots.find(worker_id),
            self.facts.nodes.get(next(iter(self.homes.of(worker_id)))),
        )
        if slot is None or slot.shape is None or node is None:
            return False
        return slot.shape.fits(node, self._link(node))

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


def _host_digests(node: NodeFacts | None) -> frozenset[Digest]:
    return (
        frozenset(copy.digest for copy in node.copies if copy.tier is Tier.HOST and copy.parts)
        if node is not None
        else frozenset()
    )
