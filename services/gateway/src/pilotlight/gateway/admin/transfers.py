"""What moves between disks, nodes and sources at the moment, as the admin API shows it."""

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI

from pilotlight.gateway.admin.nodes import Fleet
from pilotlight.policy.cluster import Liveness, NodeFacts, Transfer


def add_transfers(app: FastAPI, fleet: Fleet) -> None:
    """List transfers and the speed of links."""

    @app.get("/transfers")
    async def transfers() -> dict[str, Any]:
        """Fetches that are under way, as last reported: how far, how fast, from whom; and what each
        node's links gave when last used.
        """
        return shown_transfers(fleet.nodes())


def shown_transfers(nodes: Iterable[NodeFacts]) -> dict[str, Any]:
    """The transfers and links of nodes that report, by node; a transfer's ``left_s`` is null where
    its speed is not known.
    """
    alive = sorted(
        (node for node in nodes if node.liveness is not Liveness.DEAD),
        key=lambda node: node.node_id,
    )
    return {
        "transfers": [
            {
                "node_id": node.node_id,
                **msgspec.to_builtins(transfer),
                # Parts are counted with what pads them, so that at the end a little more may be
                # there than was asked for.
                "done_bytes": min(transfer.done_bytes, transfer.total_bytes),
                "left_s": _left_s(transfer),
            }
            for node in alive
            for transfer in node.transfers
        ],
        "links": [
            {"node_id": node.node_id, **msgspec.to_builtins(link)}
            for node in alive
            for link in node.links
        ],
    }


def _left_s(transfer: Transfer) -> float | None:
    if not transfer.bytes_per_s:
        return None
    return max(0, transfer.total_bytes - transfer.done_bytes) / transfer.bytes_per_s
