"""``pilotlight status``: services, nodes and models on one screen."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
from rich.markup import escape

from pilotlight.cli.client import AdminClient
from pilotlight.cli.home import Home
from pilotlight.cli.output import console, emit_json, show_table

MIB = 1024 * 1024
ASK_DEADLINE_S = 3.0
MAX_LISTED = 20
"""Rows of a table; more are counted."""
MAX_STARTS = 3
_SOCKET = re.compile(r"([a-z]+)-(\d+)\.sock")
_COLOURS = {
    "ready": "green",
    "starting": "cyan",
    "draining": "yellow",
    "suspect": "yellow",
    "failed": "red",
    "away": "red",
}


def show(client: AdminClient, home: Home, *, elsewhere: bool, as_json: bool) -> int:
    """Show them; 1 when a service is not ready.

    Args:
        client: Asks the gateway.
        home: Where this machine's services listen.
        elsewhere: They may run on another machine: the gateway alone is asked.
        as_json: Print JSON in place of text.
    """
    found: dict[str, Any] = {
        "url": client.url,
        "services": services(client.url, None if elsewhere else home.run_dir),
        **client.rows("nodes", "models", "cold_starts"),
        "minutes": client.get("/activity", minutes=60)["minutes"],
    }
    ok = all(service["ready"] for service in found["services"])
    if as_json:
        emit_json({"ok": ok, **found})
    else:
        _draw(found)
    return 0 if ok else 1


def services(url: str, run_dir: Path | None) -> list[dict[str, Any]]:
    """Whether each service can work, and why not.

    Args:
        url: The gateway's.
        run_dir: Where services of this machine listen; None: they are elsewhere.
    """
    found = [_asked("gateway", httpx2.HTTPTransport(), url)]
    for path in sorted(run_dir.glob("*.sock")) if run_dir is not None else ():
        named = _SOCKET.fullmatch(path.name)
        if named is None or named[1] == "gateway" or not Path(f"/proc/{named[2]}").exists():
            continue
        transport = httpx2.HTTPTransport(uds=str(path))
        found.append(_asked(named[1], transport, "http://local"))
    return found


def _asked(name: str, transport: httpx2.HTTPTransport, url: str) -> dict[str, Any]:
    try:
        with httpx2.Client(transport=transport, timeout=ASK_DEADLINE_S) as http:
            response = http.get(f"{url}/readyz")
    except httpx2.HTTPError as error:
        return {"name": name, "ready": False, "reason": f"no answer: {error}"}
    ready = response.status_code == 200
    return {"name": name, "ready": ready, "reason": "" if ready else response.text.strip()[:300]}


def _draw(found: Mapping[str, Any]) -> None:
    console.print(f"[bold]Pilotlight[/] at {escape(found['url'])}")
    counts = Counter(one["name"] for one in found["services"] if one["ready"])
    told = [f"{name}{f' x{count}' if count > 1 else ''}" for name, count in counts.items()]
    console.print(f"[green]ready[/]  {', '.join(told) or 'nothing'}", soft_wrap=True)
    for one in found["services"]:
        if not one["ready"]:
            console.print(f"[red]not ready[/]  {one['name']}: {escape(one['reason'])}")
    requests = sum(minute["requests"] for minute in found["minutes"])
    failed = sum(minute["failed"] for minute in found["minutes"])
    tokens = sum(minute["output_tokens"] for minute in found["minutes"])
    console.print(
        f"last hour  {requests:,} requests, {failed:,} failed, {tokens:,} tokens of output\n"
    )
    _nodes(found["nodes"])
    _models(found["models"])
    for start in found["cold_starts"][:MAX_STARTS]:
        took = f"{start['ttft_s'] * 1000:,.0f} ms" if start["ttft_s"] is not None else "no token"
        console.print(
            f"cold start of {start['model']}: {start['status']}, {took}; pilotlight trace {start['trace_id']}",
            markup=False,
            soft_wrap=True,
        )


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            node["key"],
            node["state"],
            ", ".join(f"{count} {kind}" for kind, count in node["kinds"].items())
            + (f", {node['unwell']} unwell" if node["unwell"] else ""),
            f"{node['used_bytes'] / MIB:,.0f} / {node['memory_bytes'] / MIB:,.0f}",
            f"{node['pool_used_bytes'] / MIB:,.0f} / {node['pool_bytes'] / MIB:,.0f}",
            str(node["running"]),
            str(node["queued"]),
            str(node["transfers"]),
        )
        for node in nodes[:MAX_LISTED]
    ]
    columns = (
        "node",
        "state",
        "devices",
        "device MiB",
        "pool MiB",
        "running",
        "queued",
        "fetches",
    )
    show_table(columns, rows, "no node reports; see `pilotlight logs loader`")
    _more(nodes, "pilotlight node list")


def _models(models: Sequence[Mapping[str, Any]]) -> None:
    counts = Counter(model["state"] for model in models)
    told = ", ".join(
        f"[{_COLOURS.get(state, 'default')}]{n} {state}[/]" for state, n in counts.items()
    )
    console.print(f"\nmodels  {told or 'none; `pilotlight run` or `pull` registers one'}")
    awake = [model for model in models if model["state"] != "cold"]
    rows = [
        (
            model["key"],
            model["state"],
            str(model["ready"]),
            str(model["starting"]),
            str(model["in_flight"]),
            f"{model['size_bytes'] / MIB:,.1f}",
            model["reason"]
            or model["phase"]
            + (f" {model['fetched']:.0%}" if model["fetched"] is not None else ""),
        )
        for model in awake[:MAX_LISTED]
    ]
    if rows:
        show_table(("model", "state", "ready", "starting", "requests", "MiB", ""), rows, "")
        _more(awake, "pilotlight model list")
    console.print()


def _more(listed: Sequence[object], command: str) -> None:
    if len(listed) > MAX_LISTED:
        console.print(f"and {len(listed) - MAX_LISTED} more: {command}")
