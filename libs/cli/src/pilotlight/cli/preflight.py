"""What ``pilotlight up`` needs of this machine: looked at before anything is made, and by
``pilotlight doctor``.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pilotlight.cache.settings import CacheSettings
from pilotlight.cli.home import SHARED_MEMORY, Home, HomeUnusable
from pilotlight.cli.own_servers import server_looks
from pilotlight.cli.plan import Endpoints, SystemOptions, child_specs
from pilotlight.common.db.migrate import MigrateSettings
from pilotlight.common.errors import FolderUnusable, MachineUnfit
from pilotlight.common.fitness import check_disk, check_files, check_folder, check_shared_memory
from pilotlight.common.natsconf import EVENTS_BYTES, StreamSettings
from pilotlight.common.settings import ENV_PREFIX, ServiceSettings
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.loader.settings import LoaderSettings
from pilotlight.materializer.settings import MaterializerSettings
from pilotlight.scheduler.settings import SchedulerSettings
from pilotlight.worker.settings import WorkerSettings

MIB = 1024 * 1024
FIRST_START_BYTES = 128 * MIB
"""A new database with its log, and some for logs and objects."""
RUN_BYTES = 32 * MIB
"""To start again on what is there."""

SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "cache": CacheSettings,
    "scheduler": SchedulerSettings,
    "materializer": MaterializerSettings,
    "loader": LoaderSettings,
    "gateway": GatewaySettings,
}
NOT_STARTED = Endpoints(
    nats_url="nats://127.0.0.1",
    database_url="postgresql:///pilotlight",
    object_store_url="file:///objects",
)
"""In the place of servers, when settings are looked at."""

Look = Callable[[], str]
"""Raises what will not do; else says what there is."""


class EngineMissing(MachineUnfit):
    """There is no torch, which workers run models on."""

    action = (
        "Install torch: in a checkout `make up` does it; of an archive, run install.sh again with --torch-from PYTHON, or one that was "
        "made with WITH_TORCH=1. Or simulate: `pilotlight up --worker-kind sim`."
    )


def looks(home: Home, options: SystemOptions, environment: Mapping[str, str]) -> dict[str, Look]:
    """The checks by name, in the order in which they are made."""
    pool_bytes = options.pool_bytes
    if pool_bytes is None:
        pool_bytes = _number(environment.get("PILOTLIGHT_POOL_BYTES"))
    needed_bytes, what_for = needed_room(home, environment)
    pool = environment.get("PILOTLIGHT_POOL_PATH")
    folder = Path(pool).absolute().parent if pool else SHARED_MEMORY
    return {
        "file limit": check_files,
        "state folder": lambda: look_at_home(home),
        "settings": lambda: look_at_settings(home, options, environment),
        "engine": lambda: look_at_engine(options.worker_kind),
        "disk": lambda: check_disk(home.root, needed_bytes, what_for),
        "shared memory": lambda: check_shared_memory(folder, pool_bytes),
        **server_looks(home, environment),
    }


def look_at_home(home: Home) -> str:
    """Whether the state folder can be used.

    Raises:
        HomeUnusable: its name will not do, or it cannot be written to.
        DiskFull: there is no room for a small file.
    """
    home.check_name()
    try:
        return check_folder(home.root, "state folder", "PILOTLIGHT_HOME")
    except FolderUnusable as error:
        raise HomeUnusable(error.message) from error


def look_at_settings(home: Home, options: SystemOptions, environment: Mapping[str, str]) -> str:
    """Whether every process can read its settings: each does so itself, but only after the servers
    were started.

    Raises:
        SettingsInvalid: one has a value that will not do.
    """
    for spec in child_specs(home, options, NOT_STARTED, environment):
        given: dict[str, Any] = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in spec.environment.items()
            if name.startswith(ENV_PREFIX)
        }
        service = spec.name.partition("-")[0]
        SETTINGS[service](**given)
        if service == "loader":
            given["device"] = "cpu" if options.worker_kind == "auto" else options.worker_kind
            WorkerSettings(**given)
    MigrateSettings()
    StreamSettings()
    return f"what is set in {ENV_PREFIX}* can be read"


def look_at_engine(worker_kind: str) -> str:
    """Whether there is what the workers' engines need.

    Raises:
        EngineMissing: there is no torch for workers that compute.
    """
    if worker_kind == "sim":
        return f"workers of kind {worker_kind} need none"
    if importlib.util.find_spec("torch") is None:
        raise EngineMissing(
            f"torch is not installed for {sys.executable}, and workers run models on it"
        )
    return "torch is installed"


def needed_room(home: Home, environment: Mapping[str, str]) -> tuple[int, str]:
    """Bytes that must be free on the disk of the state folder, and what for."""
    needed_bytes, what_for = RUN_BYTES, "for the database's log and the services' logs"
    if not environment.get("PILOTLIGHT_DATABASE_URL") and not os.path.exists(
        home.root / "postgres" / "data"
    ):
        needed_bytes, what_for = FIRST_START_BYTES, "for a new database and logs"
    if not environment.get("PILOTLIGHT_NATS_URL") and not os.path.exists(home.root / "nats"):
        events_bytes = _number(environment.get("PILOTLIGHT_EVENTS_BYTES")) or EVENTS_BYTES
        needed_bytes += events_bytes
        what_for += (
            f", and for up to {events_bytes // MIB:,} MiB of events (PILOTLIGHT_EVENTS_BYTES)"
        )
    return needed_bytes, what_for


def _number(text: str | None) -> int | None:
    """A setting that the services check themselves; None where it is none."""
    return int(text) if text and text.isascii() and text.isdigit() else None
