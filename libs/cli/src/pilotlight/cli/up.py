"""``pilotlight up``."""

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, DEMO_PROMPT, demo_model_folder, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.output import console, emit_json
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, until_signalled
from pilotlight.common.errors import NotFound


async def run_up(
    home: Home, options: SystemOptions, *, with_demo_model: bool, as_json: bool
) -> int:
    """Start, say what to try next, wait for a signal, stop.

    Args:
        home: Where the system keeps its files.
        options: What the user chose.
        with_demo_model: Register the demo model, unless it is registered.
        as_json: Print JSON in place of text.

    Raises:
        NotFound: the demo model is asked for and is not there.
    """
    try:
        options = replace(options, model_roots=(*options.model_roots, demo_model_folder()))
    except NotFound:
        if with_demo_model:
            raise

    def progress(what: str) -> None:
        if not as_json:
            console.print(f"[dim]… {escape(what)}[/]")

    async with System(home, options, progress):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as client:
            if with_demo_model:
                ensure_demo_model(client)
            workers = client.get("/workers")["workers"]
        if as_json:
            emit_json({"ready": True, "url": options.url, "home": str(home.root)})
        else:
            _say_what_to_try(home, options, workers, with_demo_model=with_demo_model)
        await until_signalled()
        progress("stopping")
    if not as_json:
        console.print("stopped")
    return 0


def told_workers(workers: Sequence[Mapping[str, Any]]) -> str:
    """How many of each kind of device."""
    kinds = Counter(worker["device"]["kind"] for worker in workers)
    names = {"cpu": "CPU", "cuda": "GPU"}
    told = [
        f"{count} {names.get(kind, kind)} worker" + ("" if count == 1 else "s")
        for kind, count in sorted(kinds.items())
    ]
    return " and ".join(told) or "no worker"


def _say_what_to_try(
    home: Home,
    options: SystemOptions,
    workers: Sequence[Mapping[str, Any]],
    *,
    with_demo_model: bool,
) -> None:
    command = _this_command()
    console.print(
        f"\n[bold green]Pilotlight is up[/] at {options.url}, with {escape(told_workers(workers))}."
    )
    lines = ["Ctrl-C stops it.", "", "In another terminal, in this folder:"]
    if os.environ.get("PILOTLIGHT_HOME"):
        lines.append(f"  export PILOTLIGHT_HOME={shlex.quote(str(home.root))}")
    if with_demo_model:
        lines += [
            f'  curl -N -i {options.url}/v1/chat/completions -H "Authorization: Bearer $(cat {_short(home.api_key)})" \\',
            f'    -H \'Content-Type: application/json\' -d \'{{"model": "{DEMO_MODEL}", "stream": true, '
            f'"messages": [{{"role": "user", "content": "{DEMO_PROMPT}"}}]}}\'',
            f"  {command} trace ID   # where its time went: ID is its x-trace-id header",
            f"  {command} run {DEMO_MODEL}   # a conversation",
        ]
    lines += [
        f"  {command} status",
        f"  {command} model list",
        f"  {command} model add NAME {_short(home.models)}/FOLDER",
        f"  {command} logs -f gateway",
        f"Dashboard: {options.url}/ui/   (sign in with the key in {_short(home.admin_key)})",
        f"Admin API: {options.url}/admin/v1/docs   (key in {_short(home.admin_key)})",
        "",
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _this_command() -> str:
    """How this program was called, or its name alone where a shell finds it by that."""
    found = shutil.which("pilotlight")
    return (
        "pilotlight"
        if found and Path(found).resolve() == Path(sys.argv[0]).resolve()
        else shlex.quote(sys.argv[0])
    )


def _short(path: Path) -> str:
    """A path for a shell, from the current folder where it lies below it."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
