"""``pilotlight model``: register, list, warm, evict, pin and delete models; why one was evicted."""

import os
from typing import Annotated

from cyclopts import App, Parameter

from pilotlight.cli.fleet_commands import warm
from pilotlight.cli.options import (
    DEFAULT_TPOT_MS,
    DEFAULT_TTFT_MS,
    Json,
    Name,
    admin_client,
)

model_app = App(name="model", help="Register, list, warm, evict, pin and delete models.")

VERIFY_TIMEOUT_S = 24 * 3600.0


@model_app.command(name="add")
def model_add(
    name: Annotated[
        str, Parameter(help="What requests call it, for example qwen2-0.5b or org/name.")
    ],
    source: Annotated[
        str,
        Parameter(
            help="Where config.json, tokenizer.json and safetensors lie: a folder, s3://bucket/prefix or hf://org/name[@revision], below "
            ".pilotlight/models or what PILOTLIGHT_MODEL_ROOTS named when the system was started."
        ),
    ],
    /,
    *,
    revision: Annotated[
        str | None, Parameter(help="Of hf://: branch, tag or commit; by default main.")
    ] = None,
    ttft_ms: Annotated[float, Parameter(help="SLO: time to first token.")] = DEFAULT_TTFT_MS,
    tpot_ms: Annotated[float, Parameter(help="SLO: time per output token.")] = DEFAULT_TPOT_MS,
    dtype: Annotated[
        str, Parameter(help="auto (the checkpoint's), bfloat16, float16, float32 or float64.")
    ] = "auto",
    min_instances: Annotated[
        int, Parameter(help="Instances that are kept loaded even when nobody asks.")
    ] = 0,
    max_instances: Annotated[int, Parameter(help="Instances at most.")] = 1,
    keep_alive_s: Annotated[
        float, Parameter(help="Seconds for which an idle instance is kept.")
    ] = 60.0,
    pinned: Annotated[
        bool, Parameter(help="Never evict it for another model.", negative="", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Register a model.

    It can be asked at once; its parameters are fetched when the first request comes.
    """
    from pilotlight.cli import models

    body: dict[str, object] = {
        "name": name,
        "uri": models.uri_of(source, elsewhere="PILOTLIGHT_URL" in os.environ),
        "dtype": dtype,
        "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
        "min_instances": min_instances,
        "max_instances": max_instances,
        "keep_alive_s": keep_alive_s,
        "pinned": pinned,
    }
    if revision is not None:
        body["revision"] = revision
    with admin_client() as client:
        return models.add(client, body, as_json=json)


@model_app.command(name="list")
def model_list(*, json: Json = False) -> int:
    """List models and how many instances of each there are."""
    from pilotlight.cli import models

    with admin_client() as client:
        return models.show(client, as_json=json)


@model_app.command(name="rm")
def model_rm(name: Name, /, *, json: Json = False) -> int:
    """Delete a model; its instances finish what they run. The checkpoint stays where it is."""
    from pilotlight.cli import models

    with admin_client() as client:
        return models.remove(client, name, as_json=json)


model_app.command(warm)


@model_app.command(name="evict")
def model_evict(name: Name, /, *, json: Json = False) -> int:
    """Have a model leave every device; its copies in host pools stay."""
    from pilotlight.cli import models

    with admin_client() as client:
        return models.evict(client, name, as_json=json)


@model_app.command(name="show")
def model_show(name: Name, /, *, json: Json = False) -> int:
    """Show one model: what it is, what is asked of it, its instances, its last cold start."""
    from pilotlight.cli import one_model

    with admin_client() as client:
        return one_model.show(client, name, as_json=json)


@model_app.command(name="set")
def model_set(
    name: Name,
    /,
    *,
    ttft_ms: Annotated[float | None, Parameter(help="SLO: time to first token.")] = None,
    tpot_ms: Annotated[float | None, Parameter(help="SLO: time per output token.")] = None,
    attainment: Annotated[
        float | None, Parameter(help="SLO: share of requests that keep it, for example 0.99.")
    ] = None,
    min_instances: Annotated[
        int | None, Parameter(help="Instances that are kept loaded even when nobody asks.")
    ] = None,
    max_instances: Annotated[int | None, Parameter(help="Instances at most.")] = None,
    keep_alive_s: Annotated[
        float | None, Parameter(help="Seconds for which an idle instance is kept.")
    ] = None,
    json: Json = False,
) -> int:
    """Change what is asked of a model; what is not named stays as it is."""
    from pilotlight.cli import one_model

    slo = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "attainment": attainment}
    rest = {
        "min_instances": min_instances,
        "max_instances": max_instances,
        "keep_alive_s": keep_alive_s,
    }
    with admin_client() as client:
        return one_model.change(client, name, slo, rest, as_json=json)


@model_app.command(name="pin")
def model_pin(name: Name, /, *, json: Json = False) -> int:
    """Never evict a model for another one."""
    from pilotlight.cli import models

    with admin_client() as client:
        return models.pin(client, name, pinned=True, as_json=json)


@model_app.command(name="unpin")
def model_unpin(name: Name, /, *, json: Json = False) -> int:
    """Let a model be evicted for others again."""
    from pilotlight.cli import models

    with admin_client() as client:
        return models.pin(client, name, pinned=False, as_json=json)


def why_evicted(
    name: Name,
    /,
    *,
    limit: Annotated[int, Parameter(help="Evictions at most, the newest.")] = 5,
    json: Json = False,
) -> int:
    """Show when a model was evicted, for whom, and why it and no other."""
    from pilotlight.cli import evictions

    with admin_client() as client:
        return evictions.why(client, name, limit, as_json=json)


@model_app.command(name="verify")
def model_verify(
    name: Name,
    /,
    *,
    timeout: Annotated[
        float, Parameter(help="Seconds that reading it may take.")
    ] = VERIFY_TIMEOUT_S,
    json: Json = False,
) -> int:
    """Read all of a model from its source and compare it with the recorded digests; record those
    that are missing.

    Ends with 1 when something differs, and says what.
    """
    from pilotlight.cli import models

    with admin_client() as client:
        return models.verify(client, name, timeout, as_json=json)
