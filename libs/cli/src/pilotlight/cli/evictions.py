"""``pilotlight why-evicted``: when a model went from a device or a host pool, for whom, and why it
and no other.
"""

from typing import Any

from rich.markup import escape

from pilotlight.cli.client import AdminClient
from pilotlight.cli.output import console, emit_json

MIB = 1024 * 1024


def why(client: AdminClient, name: str, limit: int, *, as_json: bool) -> int:
    """Show a model's last evictions, the newest first.

    Args:
        client: Asks the gateway.
        name: The model's.
        limit: Evictions at most.
        as_json: Print JSON in place of text.
    """
    found = client.get("/evictions", model=name, limit=limit)
    if as_json:
        emit_json(found)
        return 0
    if not found["evictions"]:
        console.print(f"{escape(name)} was not evicted, as far as records go back")
    for one in found["evictions"]:
        for line in lines_of(one):
            console.print(line, markup=False, soft_wrap=True)
    return 0


def lines_of(eviction: dict[str, Any]) -> list[str]:
    """One eviction in words."""
    inputs = eviction["inputs"]
    at = eviction["at"].split(".")[0].removesuffix("+00:00")
    where = "a device" if eviction["kind"] == "instance" else "the host pool"
    wanted = f" for {inputs['for_model']}" if inputs.get("for_model") else ""
    lines = [f"{at} UTC: from {where} of {eviction['node_id']}{wanted}"]
    lines.append(f"  {eviction['reason']}")
    if "loss" in inputs:
        lines.append(
            f"  loss {inputs['loss']:.3g} s of waiting for each second, {inputs['size_bytes'] / MIB:,.1f} MiB{_score_of(inputs)}"
        )
    spared = [
        f"{one['model'] or 'a copy of no model'} (loss {one['loss']:.3g}, {one['size_bytes'] / MIB:,.1f} MiB{_score_of(one)})"
        for one in inputs.get("spared", ())
    ]
    if spared:
        lines.append(f"  next would have been {', '.join(spared)}")
    return lines


def _score_of(copy: dict[str, Any]) -> str:
    """What the policy ordered by; nothing where it has queues, or the record is of a release that
    did not say.
    """
    score = copy.get("score")
    return f", score {score:.4g}" if score is not None else ""
