"""Nodes that an operator wants to be empty: intent in ``gateway.drains``, carried out by scheduler
and cache.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import NodeNotFound
from pilotlight.gateway.records.audit import Actor, record
from pilotlight.policy.cluster import HeldState, Liveness, NodeFacts, Tier, WorkerFacts
from pilotlight.policy.ids import NodeId
from pilotlight.policy.instance import ENDED

_FREE = frozenset({HeldState.EVICTED, HeldState.FAILED})


class NodeState(StrEnum):
    """What a node is to an operator."""

    READY = "ready"
    DRAINING = "draining"
    """It is to be empty, and is not yet."""
    DRAINED = "drained"
    """It is to be empty, and is: it may be switched off."""
    AWAY = "away"
    """Its loader does not report."""
    UNKNOWN = "unknown"
    """The database cannot be asked whether it is to be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """An operator's wish, and who had it."""

    node_id: NodeId
    key_id: str
    requested_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the database says of nodes."""

    drains: Mapping[NodeId, Drain]
    instances: Mapping[NodeId, frozenset[str]]
    """Instances that are not over, by the nodes that they have stages on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is still on a node."""

    instances: int
    requests: int
    copies: int

    @property
    def nothing(self) -> bool:
        """The node is empty."""
        return not (self.instances or self.requests or self.copies)


class DrainRepository:
    """Rows of ``gateway.drains``."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def begin(self, node_id: NodeId, actor: Actor) -> None:
        """A node is to be empty; asked for again, nothing changes.

        Raises:
            DatabaseUnavailable: nothing was written.
        """
        row = insert(tables.drains).values(
            node_id=node_id, key_id=actor.key_id, requested_at=func.now()
        )
        async with self._database.unit_of_work() as work:
            added = await work.connection.execute(
                row.on_conflict_do_nothing().returning(tables.drains.c.node_id)
            )
            again = added.scalar_one_or_none() is None
            await record(
                work, self._clock, actor, "node_drain", node_id, {"again": True} if again else {}
            )
            work.emit("node_drained", node_id)

    async def end(self, node_id: NodeId, actor: Actor) -> None:
        """A node may be used again.

        Raises:
            NodeNotFound: it was not to be drained.
            DatabaseUnavailable: nothing was written.
        """
        async with self._database.unit_of_work() as work:
            gone = await work.connection.execute(
                delete(tables.drains).where(tables.drains.c.node_id == node_id)
            )
            if gone.rowcount == 0:
                raise NodeNotFound(f"node {node_id!r} is not being drained", param="node_id")
            await record(work, self._clock, actor, "node_undrain", node_id, {})
            work.emit("node_undrained", node_id)

    async def intent(self) -> Intent:
        """Drains, and which instances are where.

        Raises:
            DatabaseUnavailable: they cannot be read.
        """
        table = tables.instances
        placed = select(table.c.instance_id, table.c.body["placements"].label("placements")).where(
            table.c.state.not_in([state.value for state in ENDED])
        )
        async with self._database.reading() as connection:
            drains = (await connection.execute(select(tables.drains))).all()
            rows = (await connection.execute(placed)).all()
        instances: dict[NodeId, set[str]] = {}
        for row in rows:
            for placement in row.placements:
                instances.setdefault(NodeId(placement["node_id"]), set()).add(row.instance_id)
        return Intent(
            drains={
                NodeId(row.node_id): Drain(
                    node_id=NodeId(row.node_id), key_id=row.key_id, requested_at=row.requested_at
                )
                for row in drains
            },
            instances={node_id: frozenset(found) for node_id, found in instances.items()},
        )


def left_on(
    node_id: NodeId, node: NodeFacts | None, workers: Iterable[WorkerFacts], planned: frozenset[str]
) -> Left:
    """What is on a node: by the rows, by its workers' reports, by its loader's.

    Args:
        node_id: the node.
        node: what its loader reported last; None: nothing.
        workers: all workers, as last reported.
        planned: ids of the instances that have rows on this node.
    """
    here = [
        worker
        for worker in workers
        if worker.node_id == node_id and worker.liveness is not Liveness.DEAD
    ]
    held = {
        str(one.instance_id) for worker in here for one in worker.held if one.state not in _FREE
    }
    copies = node.copies if node is not None and node.liveness is not Liveness.DEAD else ()
    return Left(
        instances=len(planned | held),
        requests=sum(worker.queue_requests + worker.running_requests for worker in here),
        copies=sum(1 for copy in copies if copy.tier is Tier.HOST),
    )


def state_of(node: NodeFacts | None, drain: Drain | None, left: Left) -> NodeState:
    """What to call a node.

    1. it is to be drained, and something is left on it: draining
    2. it is to be drained: drained, also when it has been switched off since
    3. its loader does not report: away
    4. ready
    """
    if drain is not None:
        return NodeState.DRAINED if left.nothing else NodeState.DRAINING
    if node is None or node.liveness is Liveness.DEAD:
        return NodeState.AWAY
    return NodeState.READY


def shown(
    node_id: NodeId,
    node: NodeFacts | None,
    workers: tuple[WorkerFacts, ...],
    intent: Intent | None,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """A node as the API shows it: its facts, its state, and what is left on it.

    Args:
        node_id: the node.
        node: what its loader reported last; None: nothing.
        workers: all workers, as last reported.
        intent: drains and instances by their rows; None: the database cannot be read, so that the
            state is not known.
        facts: fields of the node's report, shown as they are.
    """
    planned = (
        intent.instances.get(node_id, frozenset[str]()) if intent is not None else frozenset[str]()
    )
    left = left_on(node_id, node, workers, planned)
    drain = intent.drains.get(node_id) if intent is not None else None
    return {
        **facts,
        "node_id": node_id,
        "state": (NodeState.UNKNOWN if intent is None else state_of(node, drain, left)).value,
        "workers": sum(
            1
            for worker in workers
            if worker.node_id == node_id and worker.liveness is not Liveness.DEAD
        ),
        "devices": [
            {
                "worker_id": worker.worker_id,
                "kind": worker.device.kind.value,
                "name": worker.device.name,
                "health": worker.health.state.value,
                "reason": worker.health.reason,
            }
            for worker in workers
            if worker.node_id == node_id and worker.liveness is not Liveness.DEAD
        ],
        "left": {"instances": left.instances, "requests": left.requests, "copies": left.copies},
        "drain": None
        if drain is None
        else {"requested_at": drain.requested_at.isoformat(), "key_id": drain.key_id},
    }
