"""``pilotlight audit``: what administrators did and tried."""

from typing import Any

import msgspec

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json, show_table


def show(client: AdminClient, filters: dict[str, str | int | None], *, as_json: bool) -> int:
    """List records, the newest first."""
    wanted = {name: value for name, value in filters.items() if value is not None}
    page = client.get("/audit", **wanted)
    if as_json:
        emit_json(page)
        return 0
    rows = [
        (
            one["at"].split(".")[0].removesuffix("+00:00"),
            one["principal"] + (f" ({one['key_id'][:12]})" if one["key_id"] else ""),
            one["remote"],
            one["action"],
            one["entity"],
            one["outcome"],
            _brief(one["changes"]),
        )
        for one in page["audit"]
    ]
    show_table(
        ("at (UTC)", "who", "from", "action", "entity", "outcome", "changes"),
        rows,
        "nothing is recorded",
    )
    if page["next_before"] is not None:
        console.print(f"older ones: --before {page['next_before']}")
    return 0


def _brief(changes: dict[str, Any]) -> str:
    text = msgspec.json.encode(changes).decode() if changes else ""
    return text if len(text) <= 60 else f"{text[:59]}…"
