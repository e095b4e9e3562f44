"""``pilotlight model show`` and ``set``: one model."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rich.table import Table

from pilotlight.cli.client import AdminClient
from pilotlight.cli.loaded import told_seconds
from pilotlight.cli.output import console, emit_json, print_whole
from pilotlight.cli.waterfall import draw
from pilotlight.common.errors import UnprocessableInput

MIB = 1024 * 1024


def show(client: AdminClient, name: str, *, as_json: bool) -> int:
    """Show what it is, what is asked of it, its instances and its last cold start.

    Raises:
        ModelNotFound: there is none of that name.
    """
    model = client.get(f"/models/{quote(name)}")
    listed = client.get("/instances", limit=1000)["instances"]
    instances = [
        one for one in listed if one["model"] == name and one["state"] not in ("gone", "failed")
    ]
    starts = client.get("/cold-starts", model=name, limit=1)["cold_starts"]
    last = starts[0] if starts else None
    if as_json:
        emit_json({"model": model, "instances": instances, "last_cold_start": last})
        return 0
    _draw(model, instances)
    if last is not None:
        console.print(f"\nlast cold start, {last['created_at']}: {last['status']}", markup=False)
        console.print(draw(last, console.width))
    return 0


def change(
    client: AdminClient,
    name: str,
    slo: Mapping[str, float | None],
    rest: Mapping[str, float | None],
    *,
    as_json: bool,
) -> int:
    """Change what is named.

    Args:
        client: Asks the gateway.
        name: The model's.
        slo: Parts of the SLO; None: it stays as it is.
        rest: Other fields, likewise.
        as_json: Print JSON in place of text.

    Raises:
        UnprocessableInput: nothing is named.
        ModelNotFound: there is none of that name.
    """
    body: dict[str, Any] = {key: value for key, value in rest.items() if value is not None}
    if limits := {key: value for key, value in slo.items() if value is not None}:
        body["slo"] = limits
    if not body:
        raise UnprocessableInput(
            "nothing is to be changed: see `pilotlight model set --help` for what can be"
        )
    model = client.patch(f"/models/{quote(name)}", body)
    if as_json:
        emit_json(model)
    else:
        _draw(model, ())
    return 0


def _draw(model: Mapping[str, Any], instances: Any) -> None:
    spec, scaling, slo = model["spec"], model["scaling"], model["slo"]
    quantized = ", quantized" if spec.get("quantization") else ""
    kept = told_seconds(scaling["keep_alive_s"])
    facts = {
        "model": model["name"],
        "from": model["uri"],
        "is": f"{spec['architecture']}, {spec['num_layers']} layers, {sum(spec['part_bytes']) / MIB:,.1f} MiB, {model['dtype']}{quantized}",
        "context": f"{spec['max_context_tokens']:,} tokens",
        "SLO": f"first token within {slo['ttft_ms']:g} ms, then {slo['tpot_ms']:g} ms each, for {slo['attainment']:.2%} of requests",
        "instances": f"{scaling['min_instances']} to {scaling['max_instances']}, kept for {kept} without a request"
        + ("; pinned" if model["pinned"] else ""),
        "digest": model["digest"],
        "registered": model["created_at"],
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(no_wrap=True)
    for key, value in facts.items():
        table.add_row(key, value)
    for one in instances:
        workers = ", ".join(place["worker_id"] for place in one["body"].get("placements", ()))
        table.add_row(one["state"], f"{one['instance_id']} on {workers}")
    print_whole(table)
