"""``pilotlight node …``: what nodes there are, and emptying them."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.markup import escape

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, say, show_table
from pilotlight.common.errors import DeadlineExceeded

MIB = 1024 * 1024
POLL_INTERVAL_S = 0.5


def show(client: AdminClient, *, as_json: bool) -> int:
    """List."""
    nodes = client.get("/nodes")["nodes"]
    if as_json:
        emit_json({"nodes": nodes})
        return 0
    rows = [
        (
            node["node_id"],
            node.get("host") or "",
            node["state"],
            str(node["workers"]),
            _devices(node),
            str(node["left"]["instances"]),
            str(node["left"]["requests"]),
            str(node["left"]["copies"]),
            f"{node['pool_free_bytes'] / MIB:,.0f} / {node['pool_bytes'] / MIB:,.0f}"
            if node.get("pool_bytes") is not None
            else "",
            _disk(node),
        )
        for node in nodes
    ]
    columns = (
        "node",
        "host",
        "state",
        "workers",
        "devices",
        "instances",
        "requests",
        "host copies",
        "pool free/all MiB",
        "disk used/all MiB",
    )
    show_table(columns, rows, "no node reports; see `pilotlight logs loader`")
    return 0


def drain(client: AdminClient, node_id: str, *, wait_s: float | None, as_json: bool) -> int:
    """Ask for a node to be emptied.

    Args:
        client: Asks the gateway.
        node_id: The node's name.
        wait_s: Seconds to wait at most until it is empty; None: return at once.
        as_json: Print JSON in place of text.

    Raises:
        NodeNotFound: there is no such node.
        DeadlineExceeded: something was left on it after ``wait_s``. It goes on draining.
    """
    node = client.post(f"/nodes/{quote(node_id, safe='')}/drain")
    if wait_s is not None:
        node = _wait(client, node, wait_s, as_json=as_json)
    if as_json:
        emit_json(node)
    elif node["state"] == "drained":
        console.print(f"{node_id} is drained: nothing is left on it", markup=False)
    else:
        console.print(
            f"{node_id} is being drained; {_left(node)} left. `pilotlight node list` shows how far it is",
            markup=False,
        )
    return 0


def undrain(client: AdminClient, node_id: str, *, as_json: bool) -> int:
    """Use a node again.

    Raises:
        NodeNotFound: it was not being drained.
    """
    node = client.delete(f"/nodes/{quote(node_id, safe='')}/drain")
    say(node, f"{node_id} may be used again", as_json=as_json)
    return 0


def _wait(
    client: AdminClient, node: Mapping[str, Any], wait_s: float, *, as_json: bool
) -> Mapping[str, Any]:
    until_s = time.monotonic() + wait_s  # noqa: TID251 - a command of its own, without an event loop or a clock to be handed
    with console.status(f"draining {escape(node['node_id'])}") as status:
        while node["state"] != "drained":
            if time.monotonic() > until_s:  # noqa: TID251 - as above
                raise DeadlineExceeded(
                    f"{_left(node)} left on {node['node_id']} after {wait_s:g} s; it goes on draining"
                )
            if not as_json:
                status.update(f"draining {escape(node['node_id'])}: {_left(node)} left")
            time.sleep(POLL_INTERVAL_S)  # noqa: TID251 - as above
            listed = client.get("/nodes")["nodes"]
            node = next((one for one in listed if one["node_id"] == node["node_id"]), node)
    return node


def _devices(node: Mapping[str, Any]) -> str:
    """How many devices there are of each sort; of those that are not well, why."""
    devices = node.get("devices", ())
    well = Counter(
        one["name"] or one["kind"] for one in devices if one["health"] in ("healthy", "unwatched")
    )
    told = [name if count == 1 else f"{count} x {name}" for name, count in sorted(well.items())]
    ill = [
        f"{one['worker_id']} {one['health']}: {one['reason']}"
        for one in devices
        if one["health"] in ("degraded", "failed")
    ]
    return "; ".join((*told, *ill))


def _disk(node: Mapping[str, Any]) -> str:
    limit_bytes = node.get("disk_tier_bytes")
    return (
        f"{node['disk_tier_used_bytes'] / MIB:,.0f} / {limit_bytes / MIB:,.0f}"
        if limit_bytes
        else ""
    )


def _left(node: Mapping[str, Any]) -> str:
    left = node["left"]
    return (
        f"{left['instances']} instances, {left['requests']} requests, {left['copies']} host copies"
    )
