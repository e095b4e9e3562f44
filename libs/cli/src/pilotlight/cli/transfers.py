"""``pilotlight transfers``: what is being fetched, how far it is, from whom, and how fast."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, print_whole

MIB = 1024 * 1024
BAR_WIDTH = 24
POLL_INTERVAL_S = 0.5
NAMED_ORIGINS = 3
"""Of one transfer; more are counted."""


def show(client: AdminClient, *, watch: bool, as_json: bool) -> int:
    """Show them once, or again and again until Ctrl-C."""
    if not watch:
        _print(client.get("/transfers"), as_json=as_json)
        return 0
    if as_json or not console.is_terminal:
        while True:
            _print(client.get("/transfers"), as_json=as_json)
            time.sleep(POLL_INTERVAL_S)  # noqa: TID251 - a command of its own, without an event loop or a clock to be handed
    with Live(draw(client.get("/transfers")), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(POLL_INTERVAL_S)  # noqa: TID251 - as above
            live.update(draw(client.get("/transfers")), refresh=True)


def draw(found: Mapping[str, Any]) -> RenderableType:
    """Transfers with bars; without any, what the links gave when they were last used."""
    if found["transfers"]:
        return _transfers(found["transfers"])
    if found["links"]:
        return Group("no transfers; measured when last used:", _links(found["links"]))
    return "no transfers"


def _print(found: Mapping[str, Any], *, as_json: bool) -> None:
    emit_json(found) if as_json else print_whole(draw(found))


def _transfers(transfers: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("node", "model", "", "MiB", "MiB/s", "left", "from (MiB)")
    for one in transfers:
        share = one["done_bytes"] / one["total_bytes"] if one["total_bytes"] else 1.0
        model = escape(one["model"] or one["digest"][:12])
        table.add_row(
            escape(one["node_id"]),
            f"{model} [bright_black](prefetch)[/]" if one["priority"] == "prefetch" else model,
            ProgressBar(total=1.0, completed=share, width=BAR_WIDTH),
            f"{one['done_bytes'] / MIB:,.1f} / {one['total_bytes'] / MIB:,.1f}",
            f"{one['bytes_per_s'] / MIB:,.1f}" if one["bytes_per_s"] is not None else "",
            f"{one['left_s']:,.1f} s" if one["left_s"] is not None else "",
            escape(_origins(one["origins"])),
        )
    return table


def _origins(origins: Sequence[Mapping[str, Any]]) -> str:
    named = [f"{one['name']} {one['size_bytes'] / MIB:,.1f}" for one in origins[:NAMED_ORIGINS]]
    more = len(origins) - NAMED_ORIGINS
    return ", ".join([*named, *([f"{more} more"] if more > 0 else [])])


def _links(links: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("node", "from", "MiB/s")
    for one in links:
        table.add_row(
            escape(one["node_id"]), escape(one["name"]), f"{one['bytes_per_s'] / MIB:,.1f}"
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
