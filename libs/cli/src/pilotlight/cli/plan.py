"""What an embedded system consists of: its processes, their order, and the environment that each is
given.

No I/O.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pilotlight.cli.home import Home
from pilotlight.cli.supervisor import ChildSpec
from pilotlight.common.db.tables import OWNERS

MIB = 1024 * 1024
SERVICES = ("cache", "scheduler", "materializer", "loader", "gateway")
"""In order of start; stopped in reverse, so that the door closes first."""


CORES_OF_MANY, GATEWAYS_OF_MANY = 16, 4


def default_gateways(cores: int) -> int:
    """How many gateways a machine has, unless its user says it.

    With many cores several shorten the longest gaps between tokens and the latest first tokens of
    a wave, for each stream waits for a part of the others; with few they take processor time from
    engines.
    """
    return GATEWAYS_OF_MANY if cores >= CORES_OF_MANY else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """What a user may choose."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int | None = 1
    """None: one for each GPU, or one."""
    schedulers: int = 1
    """One leads, the others stand by."""
    caches: int = 1
    """One answers, the others stand by."""
    gateways: int = 1
    """All behind one address."""
    nodes: int = 1
    """Loaders with workers and a host pool each, as if each were a machine."""
    worker_kind: str = "auto"
    link: str = ""
    pool_bytes: int | None = None
    model_roots: tuple[Path, ...] = ()

    @property
    def url(self) -> str:
        """Where the gateway answers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"

    def processes_of(self, service: str) -> tuple[str, ...]:
        """Names of a service's processes: ``scheduler``, ``scheduler-2``, and so on."""
        counts = {
            "scheduler": self.schedulers,
            "cache": self.caches,
            "gateway": self.gateways,
            "loader": self.nodes,
        }
        return (
            service,
            *(f"{service}-{number}" for number in range(2, counts.get(service, 1) + 1)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where NATS and the database are, embedded or not."""

    nats_url: str
    database_url: str
    """Without a role: each service takes its own, with the secret of that name."""
    object_store_url: str


def child_specs(
    home: Home, options: SystemOptions, endpoints: Endpoints, environment: Mapping[str, str]
) -> tuple[ChildSpec, ...]:
    """The services' processes, in order of start.

    Args:
        home: Where their files and secrets are.
        options: What the user chose.
        endpoints: Where NATS, the database and the object store are.
        environment: What every process is given, beside what is set here.
    """
    shared = {
        **environment,
        "PILOTLIGHT_NATS_URL": endpoints.nats_url,
        "PILOTLIGHT_OBJECT_STORE_URL": endpoints.object_store_url,
        "PILOTLIGHT_RUN_DIR": str(home.run_dir),
        "PILOTLIGHT_STATE_DIR": str(home.state),
        "PILOTLIGHT_LOG_DIR": str(home.logs),
        "PILOTLIGHT_POOL_PATH": environment.get("PILOTLIGHT_POOL_PATH") or str(home.pool_path),
        "PILOTLIGHT_MODEL_ROOTS": ",".join(
            [
                environment.get("PILOTLIGHT_MODEL_ROOTS") or str(home.models),
                *(str(root) for root in options.model_roots),
            ]
        ),
    }
    # Only the migrations know the owner's credentials; a service gets its own role's below.
    shared.pop("PILOTLIGHT_DATABASE_URL", None)
    return tuple(
        ChildSpec(
            name=name,
            argv=(sys.executable, "-m", f"pilotlight.{service}"),
            environment={
                **shared,
                **_own(service, home, options, endpoints),
                **_apart(name, shared),
            },
            log_path=home.logs / f"{name}.log",
        )
        for service in SERVICES
        for name in options.processes_of(service)
    )


def _apart(name: str, shared: Mapping[str, str]) -> dict[str, str]:
    """What a further node has for itself: its id and workers, its sockets, its host pool."""
    if not name.startswith("loader-"):
        return {}
    node = name.removeprefix("loader-")
    return {
        **{
            variable: str(Path(shared[variable]) / f"node-{node}")
            for variable in ("PILOTLIGHT_RUN_DIR", "PILOTLIGHT_STATE_DIR", "PILOTLIGHT_LOG_DIR")
        },
        "PILOTLIGHT_POOL_PATH": f"{shared['PILOTLIGHT_POOL_PATH']}-{node}",
    }


def _own(service: str, home: Home, options: SystemOptions, endpoints: Endpoints) -> dict[str, str]:
    own = {"PILOTLIGHT_SECRETS_DIR": str(home.secrets_of(service))}
    if service in OWNERS:
        own["PILOTLIGHT_DATABASE_URL"] = endpoints.database_url
    if service == "gateway":
        own["PILOTLIGHT_HOST"] = options.host
        own["PILOTLIGHT_PORT"] = str(options.port)
        own["PILOTLIGHT_SHARE_PORT"] = str(options.gateways > 1).lower()
        own["PILOTLIGHT_ADMIN_KEY_FILE"] = str(home.admin_key)
        own["PILOTLIGHT_API_KEY_FILE"] = str(home.api_key)
    if service == "scheduler":
        own["PILOTLIGHT_DECISION_LOG_DIR"] = str(home.state / "decisions")
    if service == "loader":
        if options.workers is not None:
            own["PILOTLIGHT_WORKERS"] = str(options.workers)
        if options.worker_kind != "auto":
            own["PILOTLIGHT_WORKER_KIND"] = options.worker_kind
        if options.link:
            own["PILOTLIGHT_LINK"] = options.link
        if options.pool_bytes is not None:
            own["PILOTLIGHT_POOL_BYTES"] = str(options.pool_bytes)
    return own
