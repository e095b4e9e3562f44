"""``pilotlight org|project|key …`` and ``pilotlight usage``: whose requests there are."""

import re
import sys
from typing import Any
from urllib.parse import quote

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, say, show_table
from pilotlight.common.errors import BadRequest

COUNTS = ("requests", "failed", "prompt_tokens", "output_tokens")
SECONDS = ("device_s", "start_device_s", "idle_device_s")
USED = (*(name.replace("_", " ") for name in COUNTS), "device s", "cold starts s", "idle s")
"""Columns of usage."""


def show_organizations(client: AdminClient, *, as_json: bool) -> int:
    """List organizations."""
    listed = client.get("/organizations")
    if as_json:
        emit_json(listed)
        return 0
    rows = [(one["name"], _moment(one["created_at"])) for one in listed["organizations"]]
    show_table(("organization", "since (UTC)"), rows, "there is no organization")
    return 0


def make_organization(client: AdminClient, name: str, *, as_json: bool) -> int:
    """Make an organization."""
    made = client.post("/organizations", {"name": name})
    say(made, f"organization {name} is made", as_json=as_json)
    return 0


def show_projects(client: AdminClient, *, as_json: bool) -> int:
    """List projects."""
    listed = client.get("/projects")
    if as_json:
        emit_json(listed)
        return 0
    rows = [
        (
            one["name"],
            _scope(one["models"]),
            _scope(one["routes"]),
            _limits(one["limits"]),
            f"{one['weight']:g}",
            _moment(one["created_at"]),
        )
        for one in listed["projects"]
    ]
    columns = ("project", "models", "routes", "limits", "weight", "since (UTC)")
    show_table(columns, rows, "there is no project")
    return 0


def make_project(client: AdminClient, body: dict[str, Any], *, as_json: bool) -> int:
    """Make a project."""
    made = client.post("/projects", body)
    told = f"project {body['name']} is made"
    say(made, told, as_json=as_json)
    return 0


def change_project(
    client: AdminClient, name: str, scope: dict[str, list[str]], *, as_json: bool
) -> int:
    """Say anew what a project's keys may reach.

    Args:
        client: Asks the gateway.
        name: The project's.
        scope: Models and routes.
        as_json: Print JSON in place of text.
    """
    changed = client.patch(f"/projects/{quote(name)}", scope)
    told = f"project {name}: models {_scope(changed['models'])}, routes {_scope(changed['routes'])}"
    say(changed, told, as_json=as_json)
    return 0


def limit_project(
    client: AdminClient, name: str, limits: dict[str, float | None], *, as_json: bool
) -> int:
    """Say anew how much a project's keys may use together.

    Args:
        client: Asks the gateway.
        name: The project's.
        limits: With its weight; None limits nothing.
        as_json: Print JSON in place of text.
    """
    changed = client.put(f"/projects/{quote(name)}/limits", limits)
    told = f"project {name}: {_limits(changed['limits'])}, weight {changed['weight']:g}"
    say(changed, told, as_json=as_json)
    return 0


def limit_key(
    client: AdminClient, key_id: str, limits: dict[str, int | None], *, as_json: bool
) -> int:
    """Say anew how much a key may use.

    Args:
        client: Asks the gateway.
        key_id: The key's.
        limits: None limits nothing.
        as_json: Print JSON in place of text.
    """
    changed = client.put(f"{_key_path(key_id)}/limits", limits)
    told = f"{key_id}: {_limits(changed['limits'])}"
    say(changed, told, as_json=as_json)
    return 0


def show_keys(client: AdminClient, project: str | None, *, revoked: bool, as_json: bool) -> int:
    """List keys, but for the keys themselves.

    Args:
        client: Asks the gateway.
        project: Only of this one.
        revoked: Revoked ones, too.
        as_json: Print JSON in place of text.
    """
    wanted = {"revoked": str(revoked).lower()} | ({"project": project} if project else {})
    listed = client.get("/keys", **wanted)
    if as_json:
        emit_json(listed)
        return 0
    columns = ("key", "begins", "label", "role", "project", "models", "routes", "limits")
    times = ("created (UTC)", "last used", "expires") + (("revoked",) if revoked else ())
    rows = [
        (
            one["key_id"],
            one["prefix"],
            one["label"],
            one["role"] if one["role"] == "inference" else f"admin {one['admin_role']}",
            one["project"],
            _scope(one["models"]),
            _scope(one["routes"]),
            _limits(one["limits"]),
            _moment(one["created_at"]),
            _moment(one["last_used_at"]),
            _moment(one["expires_at"]),
            *((_moment(one["revoked_at"]),) if revoked else ()),
        )
        for one in listed["keys"]
    ]
    show_table((*columns, *times), rows, "there is no key")
    return 0


def make_key(client: AdminClient, body: dict[str, Any], *, as_json: bool) -> int:
    """Make a key, and show it."""
    return _show_made(client.post("/keys", body), as_json=as_json)


def rotate_key(client: AdminClient, key_id: str, overlap_s: float, *, as_json: bool) -> int:
    """Make a key in the place of another, and show it.

    Args:
        client: Asks the gateway.
        key_id: The other's.
        overlap_s: For how long the other goes on.
        as_json: Print JSON in place of text.
    """
    made = client.post(f"{_key_path(key_id)}/rotate", {"overlap_s": overlap_s})
    return _show_made(made, as_json=as_json)


def revoke_key(client: AdminClient, key_id: str, *, as_json: bool) -> int:
    """End a key."""
    client.delete(_key_path(key_id))
    if as_json:
        emit_json({"key_id": key_id, "revoked": True})
    else:
        console.print(f"{key_id} is revoked", markup=False)
    return 0


def show_usage(client: AdminClient, wanted: dict[str, str], *, as_json: bool, as_csv: bool) -> int:
    """Requests, tokens and device-seconds by day, key and model.

    Args:
        client: Asks the gateway.
        wanted: What the answer is to be narrowed to.
        as_json: Print JSON in place of text.
        as_csv: Print CSV in place of text.
    """
    if as_csv:
        sys.stdout.write(client.text("/usage", format="csv", **wanted))
        return 0
    found = client.get("/usage", **wanted)
    if as_json:
        emit_json(found)
        return 0
    rows = [
        (
            one["day"],
            one["project"],
            f"{one['key_id']} {one['label']}".strip(),
            one["model"],
            *_used(one),
        )
        for one in found["usage"]
    ]
    show_table(("day (UTC)", "project", "key", "model", *USED), rows, "nothing was used")
    return 0


def show_usage_of_models(client: AdminClient, wanted: dict[str, str], *, as_json: bool) -> int:
    """Requests, tokens and device-seconds by model, the costliest first.

    Args:
        client: Asks the gateway.
        wanted: What the answer is to be narrowed to.
        as_json: Print JSON in place of text.
    """
    found = client.get("/usage/models", **wanted)
    if as_json:
        emit_json(found)
        return 0
    costliest = sorted(found["models"], key=lambda one: -sum(one[name] for name in SECONDS))
    rows = [(one["model"], *_used(one)) for one in costliest]
    show_table(("model", *USED), rows, "nothing was used")
    return 0


def _used(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of ``USED``."""
    return (
        *(f"{row[name]:,}" for name in COUNTS),
        *(f"{row[name]:,.3f}" for name in SECONDS),
    )


def _key_path(key_id: str) -> str:
    """The route of a key.

    Raises:
        BadRequest: this is no key's id. It is not repeated: it may be the key itself.
    """
    if re.fullmatch(r"key-[0-9a-f]{16}", key_id) is None:
        raise BadRequest(
            "that is no key's id: one is key- and 16 hex digits, as `pilotlight key list` shows it"
        )
    return f"/keys/{key_id}"


def _show_made(made: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        emit_json(made)
        return 0
    console.print(f"{made['key_id']} is made. It is shown this once:", markup=False)
    console.print(made["key"], markup=False, soft_wrap=True)
    return 0


def _scope(patterns: list[str]) -> str:
    return ", ".join(patterns) or "all"


def _limits(limits: dict[str, int | None]) -> str:
    units = {
        "requests_per_minute": "requests/min",
        "tokens_per_minute": "tokens/min",
        "concurrent_requests": "at a time",
        "tokens_per_month": "tokens/month",
    }
    said = (f"{limits[name]:,} {unit}" for name, unit in units.items() if limits[name] is not None)
    return ", ".join(said) or "none"


def _moment(at: str | None) -> str:
    return (at or "").split(".")[0].split("+")[0]
