"""``pilotlight model …``."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, errors, say, show_table
from pilotlight.common.errors import BadRequest, error_of
from pilotlight.common.model_uris import FORMS, parse_uri

MIB = 1024 * 1024
POLL_INTERVAL_S = 0.5


def uri_of(source: str, *, elsewhere: bool) -> str:
    """The URI of what a user names: a URI, or a folder.

    Args:
        source: what was typed.
        elsewhere: the gateway may run on another machine, which has other folders.

    Raises:
        UriNotAllowed: a URI that no gateway takes.
        BadRequest: neither a URI nor a folder.
    """
    if "://" in source:
        parse_uri(source)
        return source
    scheme = source.partition(":")[0].lower()
    if ":" in source and scheme in ("s3", "hf", "file") and not Path(source).exists():
        raise BadRequest(
            f"{source!r}: a URI has two slashes after the colon: {FORMS}", param="source"
        )
    folder = Path(source).expanduser()
    if folder.is_file():
        raise BadRequest(
            f"{folder} is a file; a model is a folder with config.json, tokenizer.json and safetensors",
            param="source",
        )
    # A folder that is not here may be there, where the gateway is; but not one that is named from
    # here.
    if not folder.exists() and not (elsewhere and folder.is_absolute()):
        raise BadRequest(
            f"there is no folder {folder.resolve()}; a model elsewhere is named {FORMS}",
            param="source",
        )
    return folder.resolve().as_uri()


def add(client: AdminClient, body: Mapping[str, Any], *, as_json: bool) -> int:
    """Register."""
    model = client.post("/models", body)
    if as_json:
        emit_json(model)
    else:
        console.print(f"registered {told_model(model)}")
    return 0


def told_model(model: Mapping[str, Any]) -> str:
    """Name, architecture, size and type of a model, as markup."""
    size = sum(model["spec"]["part_bytes"]) / MIB
    return f"[bold]{model['name']}[/]: {model['spec']['architecture']}, {size:,.1f} MiB, {model['dtype']}"


def show(client: AdminClient, *, as_json: bool) -> int:
    """List."""
    models = client.get("/models")["models"]
    instances = client.get("/instances", limit=1000)["instances"]
    if as_json:
        emit_json({"models": models, "instances": instances})
        return 0
    grows = any(one["state"] == "consolidating" for one in instances)
    transfers: list[dict[str, Any]] = client.get("/transfers")["transfers"] if grows else []
    rows = [
        (
            model["name"],
            model["spec"]["architecture"],
            f"{sum(model['spec']['part_bytes']) / MIB:,.1f}",
            f"{model['slo']['ttft_ms']:g} / {model['slo']['tpot_ms']:g}",
            _states(
                [_told_state(one, transfers) for one in instances if one["model"] == model["name"]]
            ),
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
    say({"deleted": name}, f"deleted {name}", as_json=as_json)
    return 0


def warm(client: AdminClient, name: str, *, as_json: bool) -> int:
    """Start an instance."""
    reply = client.post(f"/models/{quote(name)}/warm")
    say(reply, f"{name} is loading, or ready, as {reply['instance_id']}", as_json=as_json)
    return 0


def evict(client: AdminClient, name: str, *, as_json: bool) -> int:
    """Release every instance."""
    reply = client.post(f"/models/{quote(name)}/evict")
    count = len(reply["instance_ids"])
    say(reply, f"{name}: {count} instances are released", as_json=as_json)
    return 0


def pin(client: AdminClient, name: str, *, pinned: bool, as_json: bool) -> int:
    """Pin, or unpin.

    Args:
        client: Asks the gateway.
        name: The model's.
        pinned: Whether it is pinned from now on.
        as_json: Print JSON in place of text.
    """
    model = client.patch(f"/models/{quote(name)}", {"pinned": pinned})
    told = "pinned" if pinned else "not pinned any more"
    say(model, f"{name} is {told}", as_json=as_json)
    return 0


def verify(client: AdminClient, name: str, timeout_s: float, *, as_json: bool) -> int:
    """Have all of a model read and compared, and wait for it; 1 when something differs.

    Args:
        client: Asks the gateway.
        name: The model's.
        timeout_s: Seconds that reading it may take.
        as_json: Print JSON in place of text.

    Raises:
        PilotlightError: it could not be read to its end.
    """
    found = client.post(f"/models/{quote(name)}/verify", {"deadline_s": timeout_s})
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=as_json) as progress:
        bar = progress.add_task(f"reading {escape(name)}", total=None)
        while found["status"] not in ("done", "failed"):
            time.sleep(POLL_INTERVAL_S)  # noqa: TID251 - a command of its own, without an event loop
            found = client.get(f"/verifications/{quote(found['verification_id'], safe='')}")
            progress.update(bar, completed=found["done_bytes"], total=found["total_bytes"] or None)
    if found["status"] == "failed":
        raise error_of(found["code"], found["error"])
    if as_json:
        emit_json(found)
    elif found["difference_count"]:
        console.print(
            f"[bold red]{escape(name)} differs[/] in {found['difference_count']} places from what is recorded:"
        )
        for difference in found["differences"]:
            console.print(f"  {difference}", markup=False, soft_wrap=True)
    else:
        filled = (
            f"; digests of {found['filled_parts']} parts were missing and are recorded now"
            if found["filled_parts"]
            else ""
        )
        console.print(
            f"{name} is what is recorded: {found['done_bytes'] / MIB:,.1f} MiB were read{filled}",
            markup=False,
        )
    return 1 if found["difference_count"] else 0


def _told_state(instance: Mapping[str, Any], transfers: Sequence[Mapping[str, Any]]) -> str:
    """With the number of its stages where it has several, how many instances it is to become, and
    how much of the model the stages that grow have fetched.
    """
    placements = instance["body"]["placements"]
    if len(placements) < 2:
        return instance["state"]
    grows = {
        one["node_id"]
        for one in placements
        if one.get("held") is not None and one["held"] != one["stage"]
    }
    coming = [
        one
        for one in transfers
        if one["node_id"] in grows and one["digest"] == instance["body"]["digest"]
    ]
    told = [f"{len(placements)} stages"]
    if (targets := instance["body"].get("targets", 1)) > 1:
        told.append(f"to become {targets} instances")
    if total := sum(one["total_bytes"] for one in coming):
        done = min(sum(one["done_bytes"] for one in coming), total)
        told.append(f"{done / total:.0%} of the rest fetched")
    return f"{instance['state']} ({', '.join(told)})"


def _states(states: list[str]) -> str:
    alive = [state for state in states if state.partition(" ")[0] not in ("gone", "failed")]
    return (
        ", ".join(f"{alive.count(state)} {state}" for state in sorted(set(alive))) or "none (cold)"
    )
