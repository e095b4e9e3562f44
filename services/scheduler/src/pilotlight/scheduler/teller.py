"""Tells workers and nodes what to hold."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, moment_of
from pilotlight.common.messages.demand import NEVER_FITS_SUBJECT, NeverFits
from pilotlight.common.messages.hold import (
    Fetch,
    Hold,
    NodeHold,
    Peer,
    WorkerHold,
    node_hold_subject,
    worker_hold_subject,
)
from pilotlight.common.telemetry import with_parent
from pilotlight.common.waiting import pause
from pilotlight.policy.cluster import NodeFacts, WorkerView
from pilotlight.policy.control.holds import (
    PartFetch,
    StageHold,
    fetches_of,
    reached_at,
    stages_of,
    upstreams_at,
)
from pilotlight.policy.control.plan import Holds, NodeTold, Told, WorkerTold
from pilotlight.policy.ids import Epoch, NodeId, WorkerId
from pilotlight.policy.liveness import DEAD_AFTER_S
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.effects import Effects

Key = TypeVar("Key", NodeId, WorkerId)
TOLD_AT_ONCE = 64
"""Holds that are published before other tasks have their turn."""


@dataclass(slots=True)
class Sent:
    """Holds of new instances, in short."""

    nodes: dict[NodeId, Told] = field(default_factory=dict[NodeId, Told])
    workers: dict[WorkerId, Told] = field(default_factory=dict[WorkerId, Told])


@dataclass(slots=True)
class _Due:
    """Who is to be told of new instances, in the order in which they came."""

    node_ids: dict[NodeId, None] = field(default_factory=dict[NodeId, None])
    worker_ids: dict[WorkerId, None] = field(default_factory=dict[WorkerId, None])
    is_told: bool = False


@dataclass(slots=True)
class Teller:
    """Sends holds, numbered under one epoch."""

    bus: Bus
    epoch: Epoch
    effects: Effects
    clock: Clock
    _seq: int = 0
    _due: _Due = field(default_factory=_Due)
    _sent: Sent = field(default_factory=Sent)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock.monotonic_s()

    async def dispatch(
        self,
        instance: Instance,
        book: Book,
        nodes: Mapping[NodeId, NodeFacts],
        *,
        alone: bool = False,
    ) -> None:
        """Tell the nodes and workers of one new instance at once, not with the next tick. Of
        instances whose rows were written together each receiver is told once.

        The nodes first: bytes take longest.

        Args:
            instance: Which.
            book: What each receiver is to hold.
            nodes: Every node.
            alone: No other is about to be told.

        Raises:
            NotLeader: the lease has run out.
        """
        due = self._due
        due.node_ids.update((one.node_id, None) for one in instance.placements)
        due.worker_ids.update((one.worker_id, None) for one in instance.placements)
        if not alone:
            await pause(0.0)
        async with self._turn:
            if due.is_told:
                return
            if due is self._due:
                self._due = _Due()
            await self._tell(due, book, nodes)
            due.is_told = True

    async def _tell(self, due: _Due, book: Book, nodes: Mapping[NodeId, NodeFacts]) -> None:
        upstreams = upstreams_at(due.node_ids, book.books, nodes)
        for node_id in due.node_ids:
            fetches = fetches_of(node_id, book.books, upstreams)
            await self.tell_node(NodeTold(node_id=node_id, fetches=fetches), nodes, between=True)
        for worker_id in due.worker_ids:
            told = WorkerTold(worker_id=worker_id, holds=stages_of(worker_id, book.books))
            await self.tell_worker(told, nodes, between=True)
        self.bus.write_now()

    def take_sent(self) -> Sent:
        """What was sent between two turns, since the last call."""
        sent, self._sent = self._sent, Sent()
        return sent

    async def tell_all(
        self,
        holds: Holds,
        nodes: Mapping[NodeId, NodeFacts],
        workers: Mapping[WorkerId, WorkerView],
    ) -> None:
        """Send what a turn says, those first that are to do something. A term's first turn tells
        everybody, which must not keep the lease from being renewed.

        Who was told of a start since the turn began is left out: the turn does not know of it, and
        would have it undone. The next one compares with what was sent.

        Raises:
            NotLeader: the lease has run out.
        """
        for part in pressing_first(holds):
            for number, node_told in enumerate(part.nodes):
                if node_told.node_id not in self._sent.nodes:
                    await self.tell_node(node_told, nodes)
                await _others_too(number)
            for number, worker_told in enumerate(part.workers):
                if worker_told.worker_id not in self._sent.workers:
                    await self.tell_worker(worker_told, nodes, workers)
                await _others_too(number)

    async def tell_worker(
        self,
        told: WorkerTold,
        nodes: Mapping[NodeId, NodeFacts],
        workers: Mapping[WorkerId, WorkerView] | None = None,
        *,
        between: bool = False,
    ) -> None:
        """Send a worker its whole desired state, with the addresses of its groups as far as they
        are known.

        Args:
            told: What it is to hold.
            nodes: For addresses.
            workers: The same; None: none are known.
            between: No tick says so, and the next one is to know of it.

        Raises:
            NotLeader: the lease has run out.
        """
        self.effects.check()
        self._seq += 1
        # Of a group a tick knows more addresses.
        kept = between and not any(one.members for one in told.holds)
        self._note(self._sent.workers, told.worker_id, told.holds if kept else None)
        with with_parent(_only_trace(told.holds)):
            command = WorkerHold(
                worker_id=told.worker_id,
                epoch=self.epoch,
                holds=tuple(_hold_of(one, nodes, workers or {}) for one in told.holds),
                seq=self._seq,
            )
            await self.bus.publish(
                worker_hold_subject(told.worker_id), command, sent=moment_of(self.clock)
            )

    async def tell_node(
        self, told: NodeTold, nodes: Mapping[NodeId, NodeFacts], *, between: bool = False
    ) -> None:
        """Send a node its whole desired state, with the addresses of those it asks.

        Args:
            told: What it is to fetch.
            nodes: For addresses.
            between: As for ``tell_worker``.

        Raises:
            NotLeader: the lease has run out.
        """
        self.effects.check()
        self._seq += 1
        self._note(self._sent.nodes, told.node_id, told.fetches if between else None)
        with with_parent(_only_trace(told.fetches)):
            fetches = tuple(_fetch_of(one, nodes) for one in told.fetches)
            command = NodeHold(
                node_id=told.node_id, epoch=self.epoch, fetches=fetches, seq=self._seq
            )
            await self.bus.publish(
                node_hold_subject(told.node_id), command, sent=moment_of(self.clock)
            )

    def _note(
        self, sent: dict[Key, Told], key: Key, orders: Sequence[StageHold | PartFetch] | None
    ) -> None:
        """What a receiver was sent last counts: between two turns, or by a turn (None)."""
        sent.pop(key, None)
        if orders is not None:
            essence = tuple(tuple(one.essence) for one in orders)
            sent[key] = Told(essence=essence, at_s=self.clock.monotonic_s())

    async def tell_never_fits(self, model: Model, message: str) -> None:
        """Tell gateways that no worker there is can hold a model. A leader that has just begun may
        not have heard of every worker.

        Raises:
            NotLeader: the lease has run out.
        """
        self.effects.check()
        if self.clock.monotonic_s() - self._began_s < DEAD_AFTER_S:
            return
        told = NeverFits(model=model.name, digest=model.digest, message=message)
        await self.bus.publish(NEVER_FITS_SUBJECT, told)


def pressing_first(holds: Holds) -> tuple[Holds, Holds]:
    """Those by which something is to be fetched or held, and those that are empty."""
    return (
        Holds(
            nodes=tuple(one for one in holds.nodes if one.fetches),
            workers=tuple(one for one in holds.workers if one.holds),
        ),
        Holds(
            nodes=tuple(one for one in holds.nodes if not one.fetches),
            workers=tuple(one for one in holds.workers if not one.holds),
        ),
    )


def _hold_of(
    hold: StageHold, nodes: Mapping[NodeId, NodeFacts], workers: Mapping[WorkerId, WorkerView]
) -> Hold:
    return Hold(
        instance_id=hold.instance_id,
        generation=hold.generation,
        model=hold.model,
        stage=hold.stage,
        device_bytes=hold.device_bytes,
        draining=hold.draining,
        drain_within_s=hold.drain_within_s,
        trace_parent=hold.trace_parent,
        members=tuple(reached_at(one, nodes, workers, hold.instance_id) for one in hold.members),
        grown_from=hold.grown_from,
    )


def _fetch_of(fetch: PartFetch, nodes: Mapping[NodeId, NodeFacts]) -> Fetch:
    known = [nodes[node_id] for node_id in fetch.upstreams if node_id in nodes]
    return Fetch(
        instance_id=fetch.instance_id,
        generation=fetch.generation,
        model=fetch.model,
        parts=fetch.parts,
        trace_parent=fetch.trace_parent,
        priority=fetch.priority,
        upstreams=tuple(
            Peer(node_id=one.node_id, host=one.dataplane_host, port=one.dataplane_port)
            for one in known
        ),
    )


def _only_trace(orders: Iterable[StageHold] | Iterable[PartFetch]) -> str:
    """A command may carry several cold starts; its header can name one trace, each order in it
    names its own.
    """
    traces = [order.trace_parent for order in orders if order.trace_parent]
    return traces[0] if len(traces) == 1 else ""


async def _others_too(number: int) -> None:
    """Let other tasks run once in a while, in the midst of much to tell."""
    if number % TOLD_AT_ONCE == TOLD_AT_ONCE - 1:
        await pause(0.0)
