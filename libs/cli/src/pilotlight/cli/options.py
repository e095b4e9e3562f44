"""Options that several commands have, and what all commands start from."""

import os
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from pilotlight.common.errors import UnprocessableInput

if TYPE_CHECKING:
    from pilotlight.cli.client import AdminClient
    from pilotlight.cli.home import Home

DEFAULT_TTFT_MS, DEFAULT_TPOT_MS = 10_000.0, 200.0
"""The SLO of a model for which none is named."""
Json = Annotated[
    bool,
    Parameter(name="--json", help="Print JSON instead of text.", negative="", show_default=False),
]
Yes = Annotated[
    bool, Parameter(name=["--yes", "-y"], help="Do not ask.", negative="", show_default=False)
]
Host = Annotated[
    str | None, Parameter(help="Address to listen on (PILOTLIGHT_HOST, else 127.0.0.1).")
]
Name = Annotated[str, Parameter(help="A name that `pilotlight model list` shows.")]
Port = Annotated[
    int | None,
    Parameter(
        help="Port to listen on (PILOTLIGHT_PORT, else 8000).",
        validator=validators.Number(gte=1, lte=65535),
    ),
]


def host_of(given: str | None) -> str:
    """The address to listen on."""
    return given or os.environ.get("PILOTLIGHT_HOST") or "127.0.0.1"


def port_of(given: int | None) -> int:
    """The port to listen on.

    Raises:
        UnprocessableInput: ``PILOTLIGHT_PORT`` is no port.
    """
    text = os.environ.get("PILOTLIGHT_PORT") or "8000"
    if given is None and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise UnprocessableInput(
            f"PILOTLIGHT_PORT is {text!r}, and a port is a number from 1 to 65535"
        )
    return given if given is not None else int(text)


def home_folder() -> "Home":
    """The state folder that the environment names."""
    from pilotlight.cli.home import Home

    return Home.from_environment()


def admin_client() -> "AdminClient":
    """A client of the system that the environment names, or that runs on the state folder."""
    from pilotlight.cli.client import AdminClient

    return AdminClient.from_environment(os.environ, home_folder())
