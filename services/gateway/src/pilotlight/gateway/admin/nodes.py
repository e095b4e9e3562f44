"""Routes of the admin API for nodes: what there is, and which of them are to be empty."""

from dataclasses import fields
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import FastAPI, Path

from pilotlight.common.errors import DatabaseUnavailable, NodeNotFound
from pilotlight.gateway.admin.drains import DrainRepository, Intent, shown
from pilotlight.gateway.admin.gate import By
from pilotlight.policy.cluster import NodeFacts, WorkerFacts
from pilotlight.policy.ids import NodeId

Node = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]


_UNREPORTED: dict[str, Any] = {field.name: None for field in fields(NodeFacts)}
"""Of a node whose loader does not report."""


class Fleet(Protocol):
    """What reports say of workers and nodes at the moment."""

    def workers(self) -> tuple[WorkerFacts, ...]:
        """Every worker that was heard of."""
        ...

    def workers_now(self) -> tuple[WorkerFacts, ...]:
        """The same with ages as of now."""
        ...

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Every node that was heard of."""
        ...


def add_nodes(app: FastAPI, fleet: Fleet, drains: DrainRepository) -> None:
    """List nodes, drain them, and use them again."""

    def one(node_id: NodeId, intent: Intent | None) -> dict[str, Any]:
        facts = next((node for node in fleet.nodes() if node.node_id == node_id), None)
        return shown(
            node_id,
            facts,
            fleet.workers(),
            intent,
            msgspec.to_builtins(facts) if facts is not None else _UNREPORTED,
        )

    @app.get("/nodes")
    async def nodes() -> dict[str, Any]:
        """Nodes as last reported: links, host pool, copies, transfers; their state, and what is
        left on them.
        """
        try:
            intent = await drains.intent()
        except DatabaseUnavailable:
            # What is reported can be shown all the same; what is wanted is not known.
            intent = None
        known = [node.node_id for node in fleet.nodes()]
        wanted = [
            node_id
            for node_id in (intent.drains if intent is not None else ())
            if node_id not in known
        ]
        return {"nodes": [one(node_id, intent) for node_id in (*known, *sorted(wanted))]}

    @app.post("/nodes/{node_id}/drain", status_code=202)
    async def drain(node_id: Node, actor: By) -> dict[str, Any]:
        """Empty a node: nothing new is placed there, what runs there ends its requests, after
        replacements where there is room.
        """
        known = sorted(node.node_id for node in fleet.nodes())
        if node_id not in known and NodeId(node_id) not in (await drains.intent()).drains:
            raise NodeNotFound(
                f"no node {node_id!r} reports; there is {', '.join(known) or 'none'}",
                param="node_id",
            )
        await drains.begin(NodeId(node_id), actor)
        return one(NodeId(node_id), await drains.intent())

    @app.delete("/nodes/{node_id}/drain")
    async def undrain(node_id: Node, actor: By) -> dict[str, Any]:
        """Use a node again."""
        await drains.end(NodeId(node_id), actor)
        return one(NodeId(node_id), await drains.intent())
