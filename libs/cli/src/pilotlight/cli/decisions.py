"""``pilotlight decision ID`` and ``pilotlight why MODEL``: what the scheduler decided, and why."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.markup import escape

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, show_table

STARTING = frozenset({"planned", "fetching", "loading"})
Row = Mapping[str, Any]


def show(client: AdminClient, decision_id: str, *, as_json: bool) -> int:
    """Fetch and show one decision.

    Raises:
        NotFound: nothing is kept of it.
    """
    decision = client.get(f"/decisions/{quote(decision_id, safe='')}")
    if as_json:
        emit_json(decision)
        return 0
    outcome: Row = decision["outcome"]
    at = decision["at"].split(".")[0].removesuffix("+00:00")
    console.print(
        f"[bold]{decision['kind']}[/] of {escape(decision['model'])} at {at} UTC,"
        f" by policies {decision['policy_version'] or 'of a release that did not say'}"
    )
    for line in explained(decision):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if (scheme := outcome.get("scheme")) is not None:
        compared = _compared(scheme, decision["actual"])
        show_table(("", "predicted", "happened", "off"), compared, "")
    others = _alternatives(outcome)
    if others:
        show_table(("compared with", "stages", "first token", "but"), others, "")
    console.print("reasons:")
    for reason in decision["reasons"]:
        console.print(f"  {reason}", markup=False, soft_wrap=True)
    if place := decision["inputs"].get("log"):
        console.print(f"in the decision log: {place}", markup=False, soft_wrap=True)
    return 0


def why(client: AdminClient, model: str, *, as_json: bool) -> int:
    """Say what a model waits for.

    Raises:
        ModelNotFound: there is no such model.
    """
    registered = client.get(f"/models/{quote(model, safe='/')}")
    name: str = registered["name"]
    held = [
        (worker["worker_id"], stage["state"])
        for worker in client.get("/workers")["workers"]
        for stage in worker["held"]
        if stage["model"] == name
    ]
    listed = client.get("/instances", limit=100)["instances"]
    failed = next(
        (
            one["body"]["reason"]
            for one in listed
            if one["model"] == name and one["state"] == "failed" and not one["body"]["served"]
        ),
        "",
    )
    starts = client.get("/cold-starts", model=name, limit=1)["cold_starts"]
    decided = client.get("/decisions", model=name, limit=1)["decisions"]
    said = waits_for(name, held, starts, decided, failed)
    if as_json:
        emit_json({"model": name, "waits_for": said[0], "why": list(said[1:])})
        return 0
    for line in said:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def waits_for(
    name: str,
    held: Sequence[tuple[str, str]],
    starts: Sequence[Row],
    decided: Sequence[Row],
    failed: str = "",
) -> tuple[str, ...]:
    """What a model waits for, a line, and then why.

    1. an instance serves: nothing
    2. one is on its way: its next phase, and when it was predicted to be there
    3. the last decision refused it: what refused
    4. its last start failed: why; the next one comes after a pause, the longer the more failed
    5. nothing was decided: nobody asks for it, or no scheduler leads

    Args:
        name: Of the model.
        held: Workers that hold stages of it, and in which state.
        starts: Its newest cold start.
        decided: The newest decision over it.
        failed: Why one of its last starts failed; empty: none did.
    """
    serving = [worker for worker, state in held if state == "ready"]
    if serving:  # 1
        return (f"{name} waits for nothing: it is served by {', '.join(serving)}",)
    last = decided[0] if decided else None
    if starts and starts[0]["status"] == "open":  # 2
        seen = sorted({phase["name"] for phase in starts[0]["phases"]})
        loading = [worker for worker, state in held if state == "loading"]
        where = f" on {', '.join(loading)}" if loading else ""
        lines = [
            f"{name} waits for its start{where}: so far {', '.join(seen) or 'nothing'} was reported"
        ]
        if last is not None and last["instance_id"] == starts[0]["instance_id"]:
            lines += explained(last)
        return tuple(lines)
    if last is not None and "refused" in last["outcome"]:  # 3
        refused = last["outcome"]
        first = f"{name} waits for room: {refused['refused']}: {refused['message']}"
        return (first, *(str(one) for one in last["reasons"]))
    if starts and starts[0]["status"] == "abandoned" and failed:  # 4
        return (
            f"{name} waits for its next start, if requests still ask for it: the last one failed",
            failed,
        )
    if last is not None:
        return (
            f"{name} waits for nothing: no request asks for it, or none has since",
            f"its last decision was {last['kind']} {last['decision_id']}",
        )
    return (f"{name} waits for nothing: no scheduler has decided anything over it",)  # 5


def explained(decision: Row) -> tuple[str, ...]:
    """Sentences: what was decided, why these workers, why so many stages."""
    outcome: Row = decision["outcome"]
    scheme: Row | None = outcome.get("scheme")
    if "refused" in outcome:
        return (f"refused: {outcome['refused']}: {outcome['message']}",)
    if scheme is None:
        return ()
    size, places = scheme["pipeline_size"], scheme.get("placements", ())
    where = ", ".join(
        f"{one['worker_id']} on {one['node_id']}"
        + (f" from {one['source']}" if one.get("source") else "")
        for one in places
    )
    stages = "1 stage" if size == 1 else f"{size} stages"
    lines = [f"{stages}: {where}"]
    fewer = [one for one in outcome.get("considered", ()) if one.get("pipeline_size", 1) < size]
    ttft = _seconds(scheme["predicted_ttft_s"])
    if not outcome.get("meets_slo", False):
        lines.append(f"no scheme meets the SLO: this one is the soonest, with {ttft}")
    elif size == 1:
        lines.append(f"one stage meets the SLO with {ttft}: no more are needed")
    elif fewer:
        best = fewer[0]
        lines.append(
            f"{best['pipeline_size']} would give the first token in"
            f" {_seconds(best['predicted_ttft_s'])}, and {size} meet the SLO with {ttft}"
        )
    if outcome.get("evicted_instances"):
        lines.append(f"evicted for it: {', '.join(outcome['evicted_instances'])}")
    return tuple(lines)


def _compared(scheme: Row, actual: Row) -> list[tuple[str, str, str, str]]:
    """Prediction and outcome, side by side; nothing may have come of it yet."""
    phases: Row = scheme.get("predicted_phase_s", {})
    happened: Row = actual.get("phase_s", {})
    rows = [
        ("first token", scheme["predicted_ttft_s"], actual.get("ttft_s")),
        ("each further token", scheme.get("predicted_tpot_s"), actual.get("tpot_s")),
    ]
    rows += [
        (name, phases.get(name), happened.get(name)) for name in dict.fromkeys((*phases, *happened))
    ]
    return [
        (name, _seconds(predicted), _seconds(took), _off(predicted, took))
        for name, predicted, took in rows
    ]


def _alternatives(outcome: Row) -> list[tuple[str, str, str, str]]:
    return [
        (
            ", ".join(one["worker_ids"]),
            str(one.get("pipeline_size", 1)),
            _seconds(one["predicted_ttft_s"]),
            one.get("refusal", ""),
        )
        for one in outcome.get("considered", ())[1:]
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"


def _off(predicted: float | None, took: float | None) -> str:
    if predicted is None or took is None or took <= 0:
        return ""
    return f"{(predicted - took) / took:+.0%}"
