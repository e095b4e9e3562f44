"""The ``pilotlight`` command."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, validators
from rich.markup import escape

from pilotlight.cli import logs, models, traces
from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo import run_demo
from pilotlight.cli.doctor import Verdict, examine
from pilotlight.cli.home import Home
from pilotlight.cli.output import console, emit_json, show_error
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.running import stop_running
from pilotlight.cli.system import run_stoppable
from pilotlight.cli.up import run_up
from pilotlight.common.errors import BadRequest, PilotlightError, UnprocessableInput
from pilotlight.common.telemetry import configure_logging
from pilotlight.dataplane.links import parse_bandwidth

app = App(
    name="pilotlight",
    help="Serves many language models from a fixed pool of devices; those that nobody asks for hold none.",
    version=lambda: version("pilotlight-cli"),
)
model_app = App(name="model", help="Register, list, warm and delete models.")
app.command(model_app)


def _check_link(_: type, value: Any) -> None:
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


@app.command
def up(
    *,
    workers: Annotated[
        int,
        Parameter(help="Workers on this machine, which share its cores and memory.", validator=validators.Number(gte=1)),
    ] = 1,
    worker_kind: Annotated[
        Literal["cpu", "sim"], Parameter(help="cpu runs the models; sim takes the time that a model would and computes nothing.")
    ] = "cpu",
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
    options = SystemOptions(host=_host(host), port=_port(port), workers=workers, worker_kind=worker_kind, link=link)
    return run_stoppable(run_up(Home.from_environment(), options, with_demo_model=with_demo_model, as_json=json))


@app.command
def down(*, json: Json = False) -> int:
    """Stop the system that `pilotlight up` started, and wait until it is gone."""
    return stop_running(Home.from_environment(), as_json=json)


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
    return run_stoppable(run_demo(Home.from_environment(), link, as_json=json))


@app.command
def doctor(*, host: Host = None, port: Port = None, json: Json = False) -> int:
    """Check this machine: port, shared memory, file limit, disk, memory, compiler, driver."""
    checks = examine(Home.from_environment(), _host(host), _port(port))
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
    return logs.show(Home.from_environment(), service, lines, follow=follow, as_json=json)


@app.command
def trace(
    trace_id: Annotated[str, Parameter(help="32 hex digits: the x-trace-id header of an answer, or trace_id in a log.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Show one request through every service, and the cold start that it caused as a waterfall."""
    with _client() as client:
        return traces.show(client, trace_id, as_json=json)


@model_app.command(name="add")
def model_add(
    name: Annotated[str, Parameter(help="What requests call it, for example qwen2-0.5b or org/name.")],
    folder: Annotated[
        str,
        Parameter(
            help="Folder with config.json, tokenizer.json and safetensors, below .pilotlight/models or what "
            "PILOTLIGHT_MODEL_ROOTS named when the system was started."
        ),
    ],
    /,
    *,
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
    body = {
        "name": name,
        "uri": Path(folder).resolve().as_uri() if "://" not in folder else folder,
        "dtype": dtype,
        "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
        "min_instances": min_instances,
        "max_instances": max_instances,
        "keep_alive_s": keep_alive_s,
        "pinned": pinned,
    }
    with _client() as client:
        return models.add(client, body, as_json=json)


@model_app.command(name="list")
def model_list(*, json: Json = False) -> int:
    """List models and how many instances of each there are."""
    with _client() as client:
        return models.show(client, as_json=json)


@model_app.command(name="rm")
def model_rm(name: Name, /, *, json: Json = False) -> int:
    """Delete a model; its instances finish what they run. The checkpoint stays where it is."""
    with _client() as client:
        return models.remove(client, name, as_json=json)


@model_app.command(name="warm")
def model_warm(name: Name, /, *, json: Json = False) -> int:
    """Load a model before a request asks for it."""
    with _client() as client:
        return models.warm(client, name, as_json=json)


def _client() -> AdminClient:
    return AdminClient.from_environment(os.environ, Home.from_environment())


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status. Errors become a sentence, or JSON, and status 1."""
    as_json = "--json" in arguments
    try:
        status = app(arguments, result_action="return_value", exit_on_error=False, print_error=not as_json)
    except PilotlightError as error:
        return show_error(error, as_json=as_json)
    except CycloptsError as error:
        return show_error(BadRequest(str(error)), as_json=True) if as_json else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status if isinstance(status, int) else 0


def main() -> None:
    """Entry point."""
    configure_logging("cli")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))
