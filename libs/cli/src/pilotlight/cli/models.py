"""``pilotlight model …``."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, show_table

MIB = 1024 * 1024


def add(client: AdminClient, body: Mapping[str, Any], *, as_json: bool) -> int:
    """Register."""
    model = client.post("/models", body)
    if as_json:
        emit_json(model)
    else:
        size = sum(model["spec"]["part_bytes"]) / MIB
        console.print(f"registered [bold]{model['name']}[/]: {model['spec']['architecture']}, {size:,.1f} MiB, {model['dtype']}")
    return 0


def show(client: AdminClient, *, as_json: bool) -> int:
    """List."""
    models = client.get("/models")["models"]
    instances = client.get("/instances", limit=1000)["instances"]
    if as_json:
        emit_json({"models": models, "instances": instances})
        return 0
    rows = [
        (
            model["name"],
            model["spec"]["architecture"],
            f"{sum(model['spec']['part_bytes']) / MIB:,.1f}",
            f"{model['slo']['ttft_ms']:g} / {model['slo']['tpot_ms']:g}",
            _states([instance["state"] for instance in instances if instance["model"] == model["name"]]),
        )
        for model in models
    ]
    show_table(
        ("name", "architecture", "MiB", "SLO ttft/tpot ms", "instances"),
        rows,
        "no models yet; register one with `pilotlight model add NAME FOLDER`",
    )
    return 0


def remove(client: AdminClient, name: str, *, as_json: bool) -> int:
    """Delete."""
    client.delete(f"/models/{quote(name)}")
    emit_json({"deleted": name}) if as_json else console.print(f"deleted {name}")
    return 0


def warm(client: AdminClient, name: str, *, as_json: bool) -> int:
    """Start an instance."""
    reply = client.post(f"/models/{quote(name)}/warm")
    emit_json(reply) if as_json else console.print(f"{name} is loading, or ready, as {reply['instance_id']}")
    return 0


def _states(states: list[str]) -> str:
    alive = [state for state in states if state not in ("gone", "failed")]
    return ", ".join(f"{alive.count(state)} {state}" for state in sorted(set(alive))) or "none (cold)"
