"""``pilotlight warm --wait``: a start with its phases, until the model is ready."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, errors
from pilotlight.common.clock import Clock
from pilotlight.common.errors import DeadlineExceeded, TransientError, error_of


def warm_and_wait(
    client: AdminClient, name: str, wait_s: float, clock: Clock, *, as_json: bool
) -> int:
    """Start an instance, and wait until it is ready.

    Args:
        client: Asks the gateway.
        name: The model's.
        wait_s: Seconds to wait at most.
        clock: Tells how long it took.
        as_json: Print JSON in place of text, and no bar.

    Raises:
        DeadlineExceeded: it is still loading after ``wait_s``.
        PilotlightError: the start failed; with its reason.
    """
    began_s = clock.monotonic_s()
    instance_id = client.post(f"/models/{quote(name)}/warm")["instance_id"]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    quiet = as_json or not errors.is_terminal
    with (
        Progress(*columns, console=errors, transient=True, disable=quiet) as progress,
        closing(client.follow("models")) as events,
    ):
        bar = progress.add_task(f"loading {escape(name)}", total=None, told="")
        row: Mapping[str, Any] = {}
        for event in events:
            row = _row_of(event, name) or row
            if row.get("ready"):
                break
            if row.get("state") != "starting":
                _check(client, instance_id)
            if clock.monotonic_s() - began_s > wait_s:
                raise DeadlineExceeded(
                    f"{name} is not ready after {wait_s:g} s; it goes on loading as {instance_id}"
                )
            share = row.get("fetched")
            told = row.get("phase", "") + (f" {share:.0%}" if share is not None else "")
            progress.update(
                bar, total=None if share is None else 1.0, completed=share or 0.0, told=told
            )
    took_s = clock.monotonic_s() - began_s
    if as_json:
        emit_json({"instance_id": instance_id, "ready": True, "took_s": round(took_s, 3)})
    else:
        console.print(f"{name} is ready after {took_s:.1f} s", markup=False)
    return 0


def _row_of(event: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    rows = event["rows"] if event is not None else ()
    return next((row for row in rows if row["key"] == name), None)


def _check(client: AdminClient, instance_id: str) -> None:
    """See that the start has not come to its end.

    Raises:
        PilotlightError: it failed; or it was given up.
    """
    listed = client.get("/instances", limit=1000)["instances"]
    found = next((one for one in listed if one["instance_id"] == instance_id), None)
    if found is None or found["state"] not in ("failed", "gone"):
        return
    reason = str(found["body"].get("reason") or f"{instance_id} is gone")
    code, colon, sentence = reason.partition(": ")
    raise error_of(code, sentence) if colon and " " not in code else TransientError(reason)
