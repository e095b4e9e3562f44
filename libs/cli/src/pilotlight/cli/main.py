"""The ``pilotlight`` command.

Each command imports what it needs when it runs: `pilotlight --version` and `--help` would otherwise wait for all of it.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, validators

from pilotlight.common.errors import BadRequest, PilotlightError, UnprocessableInput

if TYPE_CHECKING:
    from pilotlight.cli.client import AdminClient
    from pilotlight.cli.home import Home


def _version() -> str:
    from importlib.metadata import version

    return version("pilotlight-cli")


app = App(
    name="pilotlight",
    help="Serves many language models from a fixed pool of devices; those that nobody asks for hold none.",
    version=_version,
)
model_app = App(name="model", help="Register, list, warm and delete models.")
app.command(model_app)
node_app = App(name="node", help="List nodes, and empty them.")
app.command(node_app)

MAX_REPLICAS = 16
"""Of one service on one machine: each keeps connections to the database."""
VERIFY_TIMEOUT_S = 24 * 3600.0
QUICK = frozenset({"--version", "--help", "-h"})
"""With one of these nothing is done that a log would tell of."""


def _check_link(_: type, value: Any) -> None:
    from pilotlight.dataplane.links import parse_bandwidth

    parse_bandwidth(str(value))


Json = Annotated[bool, Parameter(name="--json", help="Print JSON instead of text.", negative="", show_default=False)]
Host = Annotated[str | None, Parameter(help="Address to listen on (PILOTLIGHT_HOST, else 127.0.0.1).")]
Name = Annotated[str, Parameter(help="A name that `pilotlight model list` shows.")]
Port = Annotated[
    int | None,
    Parameter(help="Port to listen on (PILOTLIGHT_PORT, else 8000).", validator=validators.Number(gte=1, lte=65535)),
]


def _host(given: str | None) -> str:
    return given or os.environ.get("PILOTLIGHT_HOST") or "127.0.0.1"


def _port(given: int | None) -> int:
    text = os.environ.get("PILOTLIGHT_PORT") or "8000"
    if given is None and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise UnprocessableInput(f"PILOTLIGHT_PORT is {text!r}, and a port is a number from 1 to 65535")
    return given if given is not None else int(text)


def _running_port(home: "Home") -> int | None:
    """The port of the system that runs, where the environment names none."""
    from urllib.parse import urlsplit

    running = home.running() if not os.environ.get("PILOTLIGHT_PORT") else None
    return urlsplit(running.url).port if running is not None else None


@app.command
def up(
    *,
    workers: Annotated[
        int | None,
        Parameter(
            help="Workers on this machine, which share its cores and memory. By default one for each GPU, or one.",
            validator=validators.Number(gte=1),
            show_default=False,
        ),
    ] = None,
    worker_kind: Annotated[
        Literal["auto", "cpu", "cuda", "sim"],
        Parameter(
            help="cpu and cuda run models, on cores or on a GPU each; auto takes GPUs where there are some that can be used; sim takes "
            "the time that a model would and computes nothing."
        ),
    ] = "auto",
    schedulers: Annotated[
        int, Parameter(help="Schedulers: one leads, the others stand by.", validator=validators.Number(gte=1, lte=MAX_REPLICAS))
    ] = 1,
    caches: Annotated[
        int, Parameter(help="Caches: one answers, the others stand by.", validator=validators.Number(gte=1, lte=MAX_REPLICAS))
    ] = 1,
    gateways: Annotated[
        int, Parameter(help="Gateways, all on one port.", validator=validators.Number(gte=1, lte=MAX_REPLICAS))
    ] = 1,
    link: Annotated[
        str,
        Parameter(
            help="Limit on how fast parameters are fetched, for example 200mbit. Without it there is none.",
            validator=_check_link,
            show_default=False,
        ),
    ] = "",
    with_demo_model: Annotated[
        bool, Parameter(help="Register the demo model, ember-7m, unless it is registered.", negative="", show_default=False)
    ] = False,
    host: Host = None,
    port: Port = None,
    json: Json = False,
) -> int:
    """Start the whole system on this machine and keep it running until Ctrl-C."""
    from pilotlight.cli.plan import SystemOptions
    from pilotlight.cli.system import run_stoppable
    from pilotlight.cli.up import run_up

    options = SystemOptions(
        host=_host(host),
        port=_port(port),
        workers=workers,
        schedulers=schedulers,
        caches=caches,
        gateways=gateways,
        worker_kind=worker_kind,
        link=link,
    )
    return run_stoppable(run_up(_home(), options, with_demo_model=with_demo_model, as_json=json))


@app.command
def down(
    *,
    purge: Annotated[
        bool,
        Parameter(help="Remove database, keys, secrets, objects and logs, too. It asks first.", negative="", show_default=False),
    ] = False,
    yes: Annotated[bool, Parameter(help="Do not ask.", negative="", show_default=False)] = False,
    json: Json = False,
) -> int:
    """Stop the system that `pilotlight up` started, and wait until it is gone."""
    from pilotlight.cli.purge import purge as purge_home
    from pilotlight.cli.running import stop_running

    home = _home()
    return purge_home(home, yes=yes, as_json=json) if purge else stop_running(home, as_json=json)


@app.command
def backup(
    file: Annotated[Path, Parameter(help="File to write, for example pilotlight.backup. It must not exist.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Write database, objects, keys and secrets into one file. The system may run meanwhile."""
    from pilotlight.cli.backup import back_up
    from pilotlight.cli.system import run_stoppable

    return run_stoppable(back_up(_home(), file, as_json=json))


@app.command
def restore(
    file: Annotated[Path, Parameter(help="A file that `pilotlight backup` wrote.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Make a new state folder from a backup; `pilotlight up` then runs on it."""
    from pilotlight.cli.backup import restore as restore_home
    from pilotlight.cli.system import run_stoppable

    return run_stoppable(restore_home(_home(), file, as_json=json))


@app.command
def demo(
    *,
    link: Annotated[
        str,
        Parameter(
            help="Limit on how fast parameters are fetched: slow enough that the phases can be seen.", validator=_check_link
        ),
    ] = "200mbit",
    json: Json = False,
) -> int:
    """Show a cold start: start a system, chat with a model that is loaded nowhere, chat again, say where the time went, stop.

    It has a state folder and a port of its own, so that it disturbs nothing.
    """
    from pilotlight.cli.demo import run_demo
    from pilotlight.cli.system import run_stoppable

    return run_stoppable(run_demo(_home(), link, as_json=json))


@app.command
def doctor(*, host: Host = None, port: Port = None, json: Json = False) -> int:
    """Check this machine: settings, port, shared memory, file limit, disk, memory, torch, compiler, driver."""
    from rich.markup import escape

    from pilotlight.cli.doctor import Verdict, examine
    from pilotlight.cli.output import console, emit_json

    home = _home()
    checks = examine(home, _host(host), port if port is not None else _running_port(home) or _port(None))
    failed = any(check.verdict is Verdict.FAILED for check in checks)
    if json:
        listed = [
            {"name": check.name, "verdict": check.verdict.value, "found": check.found, "what_to_do": check.what_to_do}
            for check in checks
        ]
        emit_json({"ok": not failed, "checks": listed})
    else:
        marks = {Verdict.OK: "[green]ok[/]     ", Verdict.WARNING: "[yellow]warning[/]", Verdict.FAILED: "[red]failed[/] "}
        for check in checks:
            advice = f"; {check.what_to_do}" if check.what_to_do else ""
            console.print(f"{marks[check.verdict]} {check.name}: {escape(check.found + advice)}", soft_wrap=True)
    return 1 if failed else 0


@app.command(name="logs")
def show_logs(
    service: Annotated[str | None, Parameter(help="One log, for example gateway; without it, all of them.")] = None,
    /,
    *,
    lines: Annotated[
        int,
        Parameter(name=["--lines", "-n"], help="How many lines of each log, from its end.", validator=validators.Number(gte=0)),
    ] = 50,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Go on until Ctrl-C.", negative="", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Show the end of the logs."""
    from pilotlight.cli import logs

    return logs.show(_home(), service, lines, follow=follow, as_json=json)


@app.command
def trace(
    trace_id: Annotated[str, Parameter(help="32 hex digits: the x-trace-id header of an answer, or trace_id in a log.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Show one request through every service, and the cold start that it caused as a waterfall."""
    from pilotlight.cli import traces

    with _client() as client:
        return traces.show(client, trace_id, as_json=json)


@model_app.command(name="add")
def model_add(
    name: Annotated[str, Parameter(help="What requests call it, for example qwen2-0.5b or org/name.")],
    source: Annotated[
        str,
        Parameter(
            help="Where config.json, tokenizer.json and safetensors lie: a folder, s3://bucket/prefix or hf://org/name[@revision], below "
            ".pilotlight/models or what PILOTLIGHT_MODEL_ROOTS named when the system was started."
        ),
    ],
    /,
    *,
    revision: Annotated[str | None, Parameter(help="Of hf://: branch, tag or commit; by default main.")] = None,
    ttft_ms: Annotated[float, Parameter(help="SLO: time to first token.")] = 10_000.0,
    tpot_ms: Annotated[float, Parameter(help="SLO: time per output token.")] = 200.0,
    dtype: Annotated[str, Parameter(help="auto (the checkpoint's), bfloat16, float16, float32 or float64.")] = "auto",
    min_instances: Annotated[int, Parameter(help="Instances that are kept loaded even when nobody asks.")] = 0,
    max_instances: Annotated[int, Parameter(help="Instances at most.")] = 1,
    keep_alive_s: Annotated[float, Parameter(help="Seconds for which an idle instance is kept.")] = 60.0,
    pinned: Annotated[bool, Parameter(help="Never evict it for another model.", negative="", show_default=False)] = False,
    json: Json = False,
) -> int:
    """Register a model. It can be asked at once; its parameters are fetched when the first request comes."""
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
    with _client() as client:
        return models.add(client, body, as_json=json)


@model_app.command(name="list")
def model_list(*, json: Json = False) -> int:
    """List models and how many instances of each there are."""
    from pilotlight.cli import models

    with _client() as client:
        return models.show(client, as_json=json)


@model_app.command(name="rm")
def model_rm(name: Name, /, *, json: Json = False) -> int:
    """Delete a model; its instances finish what they run. The checkpoint stays where it is."""
    from pilotlight.cli import models

    with _client() as client:
        return models.remove(client, name, as_json=json)


@model_app.command(name="warm")
def model_warm(name: Name, /, *, json: Json = False) -> int:
    """Load a model before a request asks for it."""
    from pilotlight.cli import models

    with _client() as client:
        return models.warm(client, name, as_json=json)


@model_app.command(name="verify")
def model_verify(
    name: Name,
    /,
    *,
    timeout: Annotated[float, Parameter(help="Seconds that reading it may take.")] = VERIFY_TIMEOUT_S,
    json: Json = False,
) -> int:
    """Read all of a model from its source and compare it with the recorded digests; record those that are missing.

    Ends with 1 when something differs, and says what.
    """
    from pilotlight.cli import models

    with _client() as client:
        return models.verify(client, name, timeout, as_json=json)


@node_app.command(name="list")
def node_list(*, json: Json = False) -> int:
    """List nodes, their state, and what is on them."""
    from pilotlight.cli import nodes

    with _client() as client:
        return nodes.show(client, as_json=json)


@node_app.command(name="drain")
def node_drain(
    node: Annotated[str, Parameter(help="A name that `pilotlight node list` shows.")],
    /,
    *,
    undo: Annotated[bool, Parameter(help="Use the node again.", negative="", show_default=False)] = False,
    wait: Annotated[bool, Parameter(help="Return when nothing is left on it.", negative="", show_default=False)] = False,
    timeout_s: Annotated[float, Parameter(help="With --wait: give up waiting after so long; it goes on draining.")] = 600.0,
    json: Json = False,
) -> int:
    """Empty a node: nothing new is placed on it, requests there end, its models are started elsewhere where there is room."""
    from pilotlight.cli import nodes

    if undo and wait:
        raise UnprocessableInput("--undo waits for nothing: leave --wait out")
    with _client() as client:
        if undo:
            return nodes.undrain(client, node, as_json=json)
        return nodes.drain(client, node, wait_s=timeout_s if wait else None, as_json=json)


@app.command(name="transfers")
def show_transfers(
    *,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], help="Go on until Ctrl-C.", negative="", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Show what nodes fetch at the moment: how far it is, how fast, and from whom."""
    from pilotlight.cli import transfers

    with _client() as client:
        return transfers.show(client, watch=watch, as_json=json)


@app.command(name="audit")
def show_audit(
    *,
    limit: Annotated[
        int, Parameter(name=["--limit", "-n"], help="Records at most.", validator=validators.Number(gte=1, lte=1000))
    ] = 50,
    before: Annotated[int | None, Parameter(help="Only older ones than this number: the next page.")] = None,
    action: Annotated[str | None, Parameter(help="Only this action, for example model_delete.")] = None,
    entity: Annotated[str | None, Parameter(help="Only what was done to this model, node or key.")] = None,
    outcome: Annotated[str | None, Parameter(help="Only this outcome: ok, asked, or an error's code.")] = None,
    key_id: Annotated[str | None, Parameter(help="Only what was done with this key.")] = None,
    json: Json = False,
) -> int:
    """Show what administrators did and tried, the newest first."""
    filters = {"limit": limit, "before": before, "action": action, "entity": entity, "outcome": outcome, "key_id": key_id}
    from pilotlight.cli import audit

    with _client() as client:
        return audit.show(client, filters, as_json=json)


def _home() -> "Home":
    from pilotlight.cli.home import Home

    return Home.from_environment()


def _client() -> "AdminClient":
    from pilotlight.cli.client import AdminClient

    return AdminClient.from_environment(os.environ, _home())


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status. Errors become a sentence, or JSON, and status 1."""
    as_json = "--json" in arguments
    try:
        status = app(arguments, result_action="return_value", exit_on_error=False, print_error=not as_json)
    except PilotlightError as error:
        return _said(error, as_json=as_json)
    except CycloptsError as error:
        return _said(BadRequest(str(error)), as_json=True) if as_json else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status if isinstance(status, int) else 0


def _said(error: PilotlightError, *, as_json: bool) -> int:
    from pilotlight.cli.output import show_error

    return show_error(error, as_json=as_json)


def main() -> None:
    """Entry point."""
    if not QUICK.intersection(sys.argv[1:]):
        from pilotlight.common.telemetry import configure_logging

        configure_logging("cli")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))
