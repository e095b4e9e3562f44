"""``pilotlight ps``: which models are loaded where, and for how long nobody has asked them."""

from collections.abc import Mapping
from typing import Any

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import emit_json, show_table

MIB = 1024 * 1024


def show(client: AdminClient, *, as_json: bool) -> int:
    """List what workers hold."""
    found = rows(client.get("/workers")["workers"], client.get("/models")["models"])
    if as_json:
        emit_json({"loaded": found})
        return 0
    columns = (
        "model",
        "state",
        "worker",
        "device",
        "layers",
        "MiB",
        "requests",
        "idle",
        "leaves",
    )
    listed = [
        (
            row["model"],
            row["state"],
            row["worker_id"],
            row["device"],
            row["layers"],
            f"{row['device_bytes'] / MIB:,.1f}",
            str(row["in_flight"]),
            told_seconds(row["idle_s"]) if not row["in_flight"] else "",
            _leaves(row),
        )
        for row in found
    ]
    show_table(columns, listed, "nothing is loaded; `pilotlight run MODEL` loads what it asks")
    return 0


def rows(workers: list[Mapping[str, Any]], models: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each stage that a worker holds, by model."""
    known = {model["name"]: model for model in models}
    found: list[dict[str, Any]] = []
    for worker in workers:
        for held in worker["held"]:
            model = known.get(held["model"])
            layers = model["spec"]["num_layers"] if model is not None else None
            stage = held["stage"]
            whole = stage["start"] == 0 and stage["stop"] == layers
            found.append(
                {
                    "model": held["model"],
                    "instance_id": held["instance_id"],
                    "state": held["state"],
                    "reason": held["reason"],
                    "node_id": worker["node_id"],
                    "worker_id": worker["worker_id"],
                    "device": worker["device"]["name"] or worker["device"]["kind"],
                    "layers": "all" if whole else f"{stage['start']}-{stage['stop'] - 1}",
                    "device_bytes": held["device_bytes"],
                    "in_flight": held["in_flight"],
                    "idle_s": round(held["idle_s"], 1),
                    "keep_alive_s": model["scaling"]["keep_alive_s"] if model else None,
                    "min_instances": model["scaling"]["min_instances"] if model else 0,
                    "pinned": bool(model and model["pinned"]),
                }
            )
    return sorted(found, key=lambda row: (row["model"], row["instance_id"], row["layers"]))


def told_seconds(seconds: float) -> str:
    """A duration for people: its largest unit, or two of them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def _leaves(row: Mapping[str, Any]) -> str:
    """When it is released if nobody asks."""
    if row["state"] != "ready":
        return row["reason"]
    if row["min_instances"]:
        return f"stays: min-instances {row['min_instances']}"
    if row["in_flight"] or row["keep_alive_s"] is None:
        return ""
    return f"in {told_seconds(max(0.0, row['keep_alive_s'] - row['idle_s']))}"
