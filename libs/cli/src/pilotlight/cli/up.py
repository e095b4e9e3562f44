"""``pilotlight up``."""

from dataclasses import replace

from rich.markup import escape

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, demo_model_folder, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.output import console, emit_json
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, until_signalled


async def run_up(home: Home, options: SystemOptions, *, with_demo_model: bool, as_json: bool) -> int:
    """Start, say what to try next, wait for a signal, stop."""
    options = replace(options, model_roots=(*options.model_roots, demo_model_folder()))

    def progress(what: str) -> None:
        if not as_json:
            console.print(f"[dim]… {escape(what)}[/]")

    async with System(home, options, progress):
        if with_demo_model:
            with AdminClient(options.url, home.admin_key.read_text().strip()) as client:
                ensure_demo_model(client)
        if as_json:
            emit_json({"ready": True, "url": options.url, "home": str(home.root)})
        else:
            _say_what_to_try(home, options, with_demo_model=with_demo_model)
        await until_signalled()
        progress("stopping")
    if not as_json:
        console.print("stopped")
    return 0


def _say_what_to_try(home: Home, options: SystemOptions, *, with_demo_model: bool) -> None:
    console.print(f"\n[bold green]Pilotlight is up[/] at {options.url}, with {options.workers} {options.worker_kind} worker(s).")
    console.print("Ctrl-C stops it.\n")
    console.print("In another terminal:")
    if with_demo_model:
        console.print(
            f'  curl -N {options.url}/v1/chat/completions -H "Authorization: Bearer $(cat {home.api_key})" \\\n'
            f'    -H \'Content-Type: application/json\' -d \'{{"model": "{DEMO_MODEL}", "stream": true, '
            '"messages": [{"role": "user", "content": "What is a pilot light?"}]}\'',
            markup=False,
            soft_wrap=True,
        )
    console.print("  pilotlight model list", markup=False)
    console.print(f"  pilotlight model add NAME {home.models}/FOLDER", markup=False, soft_wrap=True)
    console.print("  pilotlight logs -f gateway", markup=False)
    console.print(f"Admin API: {options.url}/admin/v1/docs   (key in {home.admin_key})\n", soft_wrap=True)
