"""``pilotlight completion``: what a shell needs to complete commands and options."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from pilotlight.cli.options import Json
from pilotlight.common.errors import FolderUnusable, UnprocessableInput

if TYPE_CHECKING:
    from cyclopts import App

Shell = Literal["bash", "zsh", "fish"]


def completion(
    shell: Annotated[
        Shell | None, Parameter(help="Left out, it is the one that SHELL names.")
    ] = None,
    /,
    *,
    install: Annotated[
        bool,
        Parameter(
            help="Write it where the shell looks, and name it in the shell's start file.",
            negative="",
            show_default=False,
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Print the script that lets a shell complete commands and options."""
    from pilotlight.cli.main import app
    from pilotlight.cli.output import console, emit_json

    chosen = shell or _own_shell()
    if install:
        path = str(_installed(app, chosen))
        told = f"wrote {path}; new shells complete `pilotlight`"
        emit_json({"shell": chosen, "path": path}) if json else console.print(told, markup=False)
        return 0
    script = app.generate_completion(shell=chosen)
    emit_json({"shell": chosen, "script": script}) if json else print(script)
    return 0


def _own_shell() -> Shell:
    match Path(os.environ.get("SHELL", "")).name:
        case "bash":
            return "bash"
        case "zsh":
            return "zsh"
        case "fish":
            return "fish"
        case other:
            raise UnprocessableInput(f"SHELL is {other!r}: name bash, zsh or fish")


def _installed(app: "App", shell: Shell) -> Path:
    try:
        return app.install_completion(shell=shell)
    except OSError as error:
        raise FolderUnusable(f"{error.filename} cannot be written: {error.strerror}") from error
