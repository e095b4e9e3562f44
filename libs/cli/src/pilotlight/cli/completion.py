"""``pilotlight completion``: what a shell needs to complete commands and options."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from pilotlight.cli.options import Json
from pilotlight.common.errors import FolderUnusable, UnprocessableInput

if TYPE_CHECKING:
    from cyclopts import App

Shell = Literal["bash", "zsh", "fish"]


def completion_command(app: "App") -> Callable[..., int]:
    """The command that prints the script for this application."""

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
        return _complete(app, shell or _own_shell(), install=install, as_json=json)

    return completion


def _complete(app: "App", shell: Shell, *, install: bool, as_json: bool) -> int:
    from pilotlight.cli.output import emit_json, say

    if install:
        path = str(_installed(app, shell))
        told = f"wrote {path}; new shells complete `pilotlight`"
        say({"shell": shell, "path": path}, told, as_json=as_json)
        return 0
    script = app.generate_completion(shell=shell)
    emit_json({"shell": shell, "script": script}) if as_json else print(script)
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
