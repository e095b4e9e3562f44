"""``pilotlight materialize``: a build with its steps, until the artifact is listed."""

from typing import Any
from urllib.parse import quote

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, errors, say
from pilotlight.common.clock import Clock
from pilotlight.common.errors import DeadlineExceeded, error_of
from pilotlight.common.waiting import block

LOOK_S = 0.3
MIB = 1024 * 1024


def materialize(
    client: AdminClient,
    name: str,
    clock: Clock,
    wait_s: float | None,
    *,
    as_json: bool,
) -> int:
    """Ask for a model's artifact, and wait until it is listed.

    Args:
        client: Asks the gateway.
        name: The model's.
        clock: Tells how long it took.
        wait_s: Seconds to wait at most; None: not at all.
        as_json: Print JSON in place of text, and no bar.

    Raises:
        DeadlineExceeded: it is not listed after ``wait_s``.
        PilotlightError: the build failed; with its reason.
    """
    began_s = clock.monotonic_s()
    found = client.post(f"/models/{quote(name)}/materialize")
    known = {one["fingerprint"] for one in found["artifacts"]}
    if wait_s is None:
        say(found, f"{name} is to be materialized by a worker with time", as_json=as_json)
        return 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    quiet = as_json or not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=quiet) as progress:
        bar = progress.add_task(f"materializing {escape(name)}", total=1.0, told="waits for time")
        while not known and not (done := _done(found)):
            _check(found)
            if clock.monotonic_s() - began_s > wait_s:
                raise DeadlineExceeded(
                    f"{name} is not materialized after {wait_s:g} s; its build goes on"
                    + (f" later ({waits})" if (waits := _waits(found)) else "")
                )
            block(LOOK_S)
            found = client.get(f"/models/{quote(name)}/materials")
            building = next((one for one in found["builds"] if one["state"] == "building"), None)
            if building is not None:
                progress.update(bar, completed=building["share"], told=building["step"])
            elif waits := _waits(found):
                progress.update(bar, completed=0.0, told=escape(waits))
        done = _done(found)
    took_s = clock.monotonic_s() - began_s
    if as_json:
        emit_json({**found, "took_s": round(took_s, 3)})
    else:
        told = "has been materialized before" if known else f"is materialized after {took_s:.1f} s"
        console.print(f"{name} {told}{_figures(done) if done else ''}", markup=False)
    return 0


def _done(found: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in found["artifacts"] if one["kind"] == "manifest"), None)


def _figures(done: dict[str, Any]) -> str:
    """What its profile says, as far as it was measured."""
    told = f"; prompts at {done['prefill_tokens_per_s']:,.0f} tokens/s"
    # An artifact of an earlier release, or a gateway of one, says no more.
    if rate := done.get("load_bytes_per_s"):
        told += f"; from a node's memory at {rate / MIB:,.0f} MiB/s"
    if (restore_s := done.get("restore_s")) and (init_s := done.get("init_s")):
        told += f", and {restore_s:.3f} s beside that in the place of {init_s:.3f} s"
    return told


def _waits(found: dict[str, Any]) -> str:
    """What a build waits for that no worker has begun; empty: for a worker with time."""
    waiting = (one["reason"] for one in found["builds"] if one["state"] == "waiting")
    return next((reason.partition(": ")[2] for reason in waiting if reason), "")


def _check(found: dict[str, Any]) -> None:
    """See that no build has failed since it was asked for.

    Raises:
        PilotlightError: one has.
    """
    for one in found["builds"]:
        if one["state"] == "failed" and one["changed_at"] > found["asked_at"]:
            code, _, sentence = one["reason"].partition(": ")
            raise error_of(code, sentence)
