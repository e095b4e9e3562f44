"""The ``pilotlight`` command."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from pilotlight.cli import logs, models, traces
from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo import run_demo
from pilotlight.cli.doctor import Verdict, examine
from pilotlight.cli.home import Home
from pilotlight.cli.output import console, emit_json, show_error
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.running import stop_running
from pilotlight.cli.up import run_up
from pilotlight.common.errors import PilotlightError
from pilotlight.common.telemetry import configure_logging

app = App(
    name="pilotlight", help="Serves thousands of language models from a fixed pool of GPUs: cold ones too, within their SLO."
)
model_app = App(name="model", help="Registered models.")
app.command(model_app)

Json = Annotated[bool, Parameter(name="--json", help="One JSON document instead of text.", negative="")]
Host = Annotated[str | None, Parameter(help="Address to listen on (PILOTLIGHT_HOST, else 127.0.0.1).")]
Port = Annotated[int | None, Parameter(help="Port to listen on (PILOTLIGHT_PORT, else 8000).")]


def _host(given: str | None) -> str:
    return given or os.environ.get("PILOTLIGHT_HOST") or "127.0.0.1"


def _port(given: int | None) -> int:
    return given if given is not None else int(os.environ.get("PILOTLIGHT_PORT") or 8000)


@app.command
def up(
    *,
    workers: Annotated[int, Parameter(help="CPU workers on this node.")] = 1,
    worker_kind: Annotated[Literal["cpu", "sim"], Parameter(help="`sim` answers with timings and computes nothing.")] = "cpu",
    link: Annotated[str, Parameter(help="Limit on each source of parameters, for example 200mbit.")] = "",
    with_demo_model: Annotated[bool, Parameter(help="Register the demo model.", negative="")] = False,
    host: Host = None,
    port: Port = None,
    json: Json = False,
) -> int:
    """Start the whole system on this machine and keep it running until Ctrl-C."""
    options = SystemOptions(host=_host(host), port=_port(port), workers=workers, worker_kind=worker_kind, link=link)
    return asyncio.run(run_up(Home.from_environment(), options, with_demo_model=with_demo_model, as_json=json))


@app.command
def down(*, json: Json = False) -> int:
    """Stop the system that runs on the state folder."""
    return stop_running(Home.from_environment(), as_json=json)


@app.command
def demo(
    *,
    link: Annotated[str, Parameter(help="Limit on each source of parameters, so that the phases can be seen.")] = "200mbit",
    json: Json = False,
) -> int:
    """Start a system, chat with a model that is loaded nowhere, chat again, show the cold start, stop."""
    return asyncio.run(run_demo(Home.from_environment(), link, as_json=json))


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
            console.print(f"{marks[check.verdict]} {check.name}: {check.found}{advice}", soft_wrap=True)
    return 1 if failed else 0


@app.command(name="logs")
def show_logs(
    service: Annotated[str | None, Parameter(help="One service; without it, all of them.")] = None,
    *,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Lines of each log.")] = 50,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Go on until Ctrl-C.", negative="")] = False,
    json: Json = False,
) -> int:
    """Show what the services logged."""
    return logs.show(Home.from_environment(), service, lines, follow=follow, as_json=json)


@app.command
def trace(trace_id: str, *, json: Json = False) -> int:
    """Show a trace: its spans, and the cold start that belongs to it as a waterfall."""
    with _client() as client:
        return traces.show(client, trace_id, as_json=json)


@model_app.command(name="add")
def model_add(
    name: str,
    uri: Annotated[str, Parameter(help="A folder with config.json and safetensors, below an allowed root.")],
    *,
    ttft_ms: Annotated[float, Parameter(help="SLO: time to first token.")] = 10_000.0,
    tpot_ms: Annotated[float, Parameter(help="SLO: time per output token.")] = 200.0,
    dtype: Annotated[str, Parameter(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    min_instances: int = 0,
    max_instances: int = 1,
    keep_alive_s: Annotated[float, Parameter(help="How long an idle instance is kept.")] = 60.0,
    pinned: Annotated[bool, Parameter(help="Never evicted for another model.", negative="")] = False,
    json: Json = False,
) -> int:
    """Register a model. It can be asked at once; its parameters are fetched when the first request comes."""
    body = {
        "name": name,
        "uri": Path(uri).resolve().as_uri() if "://" not in uri else uri,
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
    """List registered models and where they are loaded."""
    with _client() as client:
        return models.show(client, as_json=json)


@model_app.command(name="rm")
def model_rm(name: str, *, json: Json = False) -> int:
    """Delete a model; its instances end what they run and go."""
    with _client() as client:
        return models.remove(client, name, as_json=json)


@model_app.command(name="warm")
def model_warm(name: str, *, json: Json = False) -> int:
    """Load a model before a request asks for it."""
    with _client() as client:
        return models.warm(client, name, as_json=json)


def _client() -> AdminClient:
    return AdminClient.from_environment(os.environ, Home.from_environment())


def main() -> None:
    """Entry point: errors of the taxonomy become a sentence and exit status 1."""
    configure_logging("cli")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        status = app(sys.argv[1:], result_action="return_value")
    except PilotlightError as error:
        status = show_error(error, as_json="--json" in sys.argv)
    sys.exit(status if isinstance(status, int) else 0)
