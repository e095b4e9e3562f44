"""``pilotlight model …``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, show_table
from pilotlight.common.errors import BadRequest
from pilotlight.common.model_uris import FORMS, parse_uri

MIB = 1024 * 1024


def uri_of(source: str) -> str:
    """The URI of what a user names: a URI, or a folder of this machine.

    Raises:
        UriNotAllowed: a URI that no gateway takes.
        BadRequest: neither a URI nor a folder.
    """
    if "://" in source:
        parse_uri(source)
        return source
    scheme = source.partition(":")[0].lower()
    if ":" in source and scheme in ("s3", "hf", "file") and not Path(source).exists():
        raise BadRequest(f"{source!r}: a URI has two slashes after the colon: {FORMS}", param="source")
    folder = Path(source).expanduser()
    # A folder that is not here may be there, where the gateway is; but not one that is named from here.
    if not folder.is_absolute() and not folder.exists():
        raise BadRequest(f"there is no folder {folder.resolve()}; a model elsewhere is named {FORMS}", param="source")
    return folder.resolve().as_uri()


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
        "no models yet; register one with `pilotlight model add NAME SOURCE`",
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
