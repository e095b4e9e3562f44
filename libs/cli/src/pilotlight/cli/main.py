"""The ``pilotlight`` command.

Each command imports what it needs when it runs: `pilotlight --version` and `--help` would otherwise
wait for all of it.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, validators

from pilotlight.cli.bench_commands import bench
from pilotlight.cli.chat_commands import pull, run_model
from pilotlight.cli.completion import completion_command
from pilotlight.cli.decision_commands import replay, show_decision, why
from pilotlight.cli.fleet_commands import materialize, ps, show_logs, status, trace, warm
from pilotlight.cli.model_commands import model_app, why_evicted
from pilotlight.cli.node_commands import node_app
from pilotlight.cli.options import Host, Json, Port, admin_client, home_folder, host_of, port_of
from pilotlight.cli.simulate_commands import simulate_app
from pilotlight.cli.tenant_commands import key_app, org_app, project_app, usage
from pilotlight.common.errors import BadRequest, PilotlightError

if TYPE_CHECKING:
    from pilotlight.cli.home import Home


def _version() -> str:
    from importlib.metadata import version

    return version("pilotlight-cli")


app = App(
    name="pilotlight",
    help="Serves many language models from a fixed pool of devices; those that nobody asks for hold none.",
    version=_version,
)
app.command(run_model, name=("run", "chat"))
app.command(pull)
app.command(ps)
app.command(status)
app.command(warm)
app.command(materialize)
app.command(trace)
app.command(show_logs, name="logs")
app.command(bench)
app.command(model_app)
app.command(node_app)
app.command(simulate_app)
app.command(org_app)
app.command(project_app)
app.command(key_app)
app.command(usage)
app.command(show_decision, name="decision")
app.command(why)
app.command(replay)
app.command(why_evicted)
app.command(completion_command(app))

MAX_REPLICAS = 16
"""Of one service on one machine: each keeps connections to the database."""
REPLICAS = validators.Number(gte=1, lte=MAX_REPLICAS)
QUICK = frozenset({"--version", "--help", "-h"})
"""With one of these nothing is done that a log would tell of."""


def _check_link(_: type, value: Any) -> None:
    from pilotlight.dataplane.bandwidth import parse_bandwidth

    parse_bandwidth(str(value))


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
        int,
        Parameter(help="Schedulers: one leads, the others stand by.", validator=REPLICAS),
    ] = 1,
    caches: Annotated[
        int,
        Parameter(help="Caches: one answers, the others stand by.", validator=REPLICAS),
    ] = 1,
    gateways: Annotated[
        int | None,
        Parameter(
            help="Gateways, all on one port. By default one, or two on 16 cores or more.",
            validator=REPLICAS,
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int,
        Parameter(
            help="Nodes that this machine plays, each with such workers, a host pool and a link of its own.",
            validator=REPLICAS,
        ),
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
        bool,
        Parameter(
            help="Register the demo model, ember-7m, unless it is registered.",
            negative="",
            show_default=False,
        ),
    ] = False,
    host: Host = None,
    port: Port = None,
    json: Json = False,
) -> int:
    """Start the whole system on this machine and keep it running until Ctrl-C."""
    from pilotlight.cli.plan import SystemOptions, default_gateways
    from pilotlight.cli.system import run_stoppable
    from pilotlight.cli.up import run_up

    options = SystemOptions(
        host=host_of(host),
        port=port_of(port),
        workers=workers,
        schedulers=schedulers,
        caches=caches,
        gateways=gateways or default_gateways(len(os.sched_getaffinity(0))),
        nodes=nodes,
        worker_kind=worker_kind,
        link=link,
    )
    return run_stoppable(
        run_up(home_folder(), options, with_demo_model=with_demo_model, as_json=json)
    )


@app.command
def down(
    *,
    purge: Annotated[
        bool,
        Parameter(
            help="Remove database, keys, secrets, objects and logs, too. It asks first.",
            negative="",
            show_default=False,
        ),
    ] = False,
    yes: Annotated[bool, Parameter(help="Do not ask.", negative="", show_default=False)] = False,
    json: Json = False,
) -> int:
    """Stop the system that `pilotlight up` started, and wait until it is gone."""
    from pilotlight.cli.purge import purge as purge_home
    from pilotlight.cli.running import stop_running

    home = home_folder()
    return purge_home(home, yes=yes, as_json=json) if purge else stop_running(home, as_json=json)


@app.command
def backup(
    file: Annotated[
        Path, Parameter(help="File to write, for example pilotlight.backup. It must not exist.")
    ],
    /,
    *,
    json: Json = False,
) -> int:
    """Write database, objects, keys and secrets into one file. The system may run meanwhile."""
    from pilotlight.cli.backup import back_up
    from pilotlight.cli.system import run_stoppable

    return run_stoppable(back_up(home_folder(), file, as_json=json))


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

    return run_stoppable(restore_home(home_folder(), file, as_json=json))


@app.command
def demo(
    *,
    link: Annotated[
        str,
        Parameter(
            help="Limit on how fast parameters are fetched: slow enough that the phases can be seen.",
            validator=_check_link,
        ),
    ] = "200mbit",
    json: Json = False,
) -> int:
    """Show a cold start: start a system, chat with a model that is loaded nowhere, chat again, say
    where the time went, stop.

    It has a state folder and a port of its own, so that it disturbs nothing.
    """
    from pilotlight.cli.demo import run_demo
    from pilotlight.cli.system import run_stoppable

    return run_stoppable(run_demo(home_folder(), link, as_json=json))


@app.command
def doctor(*, host: Host = None, port: Port = None, json: Json = False) -> int:
    """Check this machine: settings, port, shared memory, file limit, disk, memory, torch, compiler,
    driver.
    """
    from rich.markup import escape

    from pilotlight.cli.doctor import Verdict, examine
    from pilotlight.cli.output import console, emit_json

    home = home_folder()
    checks = examine(
        home, host_of(host), port if port is not None else _running_port(home) or port_of(None)
    )
    failed = any(check.verdict is Verdict.FAILED for check in checks)
    if json:
        listed = [
            {
                "name": check.name,
                "verdict": check.verdict.value,
                "found": check.found,
                "what_to_do": check.what_to_do,
            }
            for check in checks
        ]
        emit_json({"ok": not failed, "checks": listed})
    else:
        marks = {
            Verdict.OK: "[green]ok[/]     ",
            Verdict.WARNING: "[yellow]warning[/]",
            Verdict.FAILED: "[red]failed[/] ",
        }
        for check in checks:
            advice = f"; {check.what_to_do}" if check.what_to_do else ""
            console.print(
                f"{marks[check.verdict]} {check.name}: {escape(check.found + advice)}",
                soft_wrap=True,
            )
    return 1 if failed else 0


@app.command(name="transfers")
def show_transfers(
    *,
    watch: Annotated[
        bool,
        Parameter(
            name=["--watch", "-w"], help="Go on until Ctrl-C.", negative="", show_default=False
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Show what nodes fetch at the moment: how far it is, how fast, and from whom."""
    from pilotlight.cli import transfers

    with admin_client() as client:
        return transfers.show(client, watch=watch, as_json=json)


@app.command(name="audit")
def show_audit(
    *,
    limit: Annotated[
        int,
        Parameter(
            name=["--limit", "-n"],
            help="Records at most.",
            validator=validators.Number(gte=1, lte=1000),
        ),
    ] = 50,
    before: Annotated[
        int | None, Parameter(help="Only older ones than this number: the next page.")
    ] = None,
    action: Annotated[
        str | None, Parameter(help="Only this action, for example model_delete.")
    ] = None,
    entity: Annotated[
        str | None, Parameter(help="Only what was done to this model, node or key.")
    ] = None,
    outcome: Annotated[
        str | None, Parameter(help="Only this outcome: ok, asked, or an error's code.")
    ] = None,
    key_id: Annotated[str | None, Parameter(help="Only what was done with this key.")] = None,
    json: Json = False,
) -> int:
    """Show what administrators did and tried, the newest first."""
    filters = {
        "limit": limit,
        "before": before,
        "action": action,
        "entity": entity,
        "outcome": outcome,
        "key_id": key_id,
    }
    from pilotlight.cli import audit

    with admin_client() as client:
        return audit.show(client, filters, as_json=json)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status. Errors become a sentence, or JSON, and status 1."""
    as_json = "--json" in arguments
    try:
        status = app(
            arguments, result_action="return_value", exit_on_error=False, print_error=not as_json
        )
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
