"""``pilotlight trace ID``, of a request or a trace: spans as a tree on one axis, the cold start."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json
from pilotlight.cli.waterfall import draw
from pilotlight.common.errors import BadRequest

SPAN_WIDTH = 26
"""Of the names of spans; longer ones are cut, so that numbers never are."""
GAPS_WIDTH = 6
MIN_WIDTH = 20


def show(client: AdminClient, named: str, *, as_json: bool) -> int:
    """Fetch and show one trace, by its own id or a request's.

    Raises:
        BadRequest: this is neither.
        TraceNotFound: nothing is kept of it.
    """
    trace_id = named
    if re.fullmatch(r"[0-9a-f]{32}", named) is None:
        if re.fullmatch(r"req-[0-9a-zA-Z-]{1,96}", named) is None:
            raise BadRequest(
                "a request's id begins with req-, as in the header x-request-id of an answer, and a trace's is 32 hex digits, as in "
                f"x-trace-id; not {named[:100]!r}"
            )
        trace_id = client.get("/traces", request_id=named)["trace_id"]
    trace = client.get(f"/traces/{trace_id}")
    if as_json:
        emit_json(trace)
        return 0
    if trace["spans"]:
        console.print(_tree(trace["spans"], console.width))
    for cold_start in trace["cold_starts"]:
        console.print(
            f"\ncold start of [bold]{cold_start['model']}[/] as {cold_start['instance_id']}: {cold_start['status']}"
        )
        console.print(draw(cold_start, console.width))
    return 0


def _tree(spans: Sequence[Mapping[str, Any]], console_width: int) -> Table:
    known = {span["span_id"] for span in spans}
    children: dict[str, list[Mapping[str, Any]]] = {}
    for span in spans:
        parent = span["parent_id"] if span["parent_id"] in known else ""
        children.setdefault(parent, []).append(span)
    start_s = min(_seconds(span["start_at"]) for span in spans)
    total_s = max(max(_seconds(span["end_at"]) for span in spans) - start_s, 1e-6)
    table = Table(box=None, pad_edge=False, header_style="bold")
    ms_width = len(f"{total_s * 1000:,.1f}")
    service_width = max(len("service"), *(len(span["service"]) for span in spans))
    labels_width = SPAN_WIDTH + service_width + ms_width + GAPS_WIDTH
    width = max(MIN_WIDTH, console_width - labels_width)
    table.add_column("span", no_wrap=True, max_width=SPAN_WIDTH)
    table.add_column("service", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True, min_width=ms_width)
    end = f"{total_s * 1000:,.0f} ms"
    table.add_column(f"0 {'─' * (width - len(end) - 3)} {end}", no_wrap=True)

    def add(parent: str, depth: int) -> None:
        for span in sorted(children.get(parent, []), key=lambda one: one["start_at"]):
            begin, end = _seconds(span["start_at"]) - start_s, _seconds(span["end_at"]) - start_s
            first = min(width - 1, int(begin / total_s * width))
            last = max(first, min(width - 1, int(end / total_s * width)))
            bar = " " * first + "█" * (last - first + 1)
            style = "red" if span["status"] != "ok" else None
            table.add_row(
                "  " * depth + escape(span["name"]),
                escape(span["service"]),
                f"{(end - begin) * 1000:,.1f}",
                bar,
                style=style,
            )
            add(span["span_id"], depth + 1)

    add("", 0)
    return table


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
