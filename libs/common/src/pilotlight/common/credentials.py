"""The secrets of an installation: which there are, how they are made, which service is given which.

``python -m pilotlight.common.credentials FOLDER`` makes what is missing below ``FOLDER/all`` and
gives each holder a folder beside it with its own secrets and no others. It may be run again at any
time: a secret that is there stays, one that was replaced in ``all`` is replaced for its holders.
"""

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import structlog

from pilotlight.common.db.tables import OWNERS
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.natsconf import ADMIN, RIGHTS, STORE_BYTES, StreamSettings, server_config
from pilotlight.common.telemetry import configure_logging

log = structlog.get_logger()

NATS_USERS = (*RIGHTS, ADMIN)
SECRETS_OF: dict[str, tuple[str, ...]] = {
    "gateway": ("nats-gateway", "postgres-gateway", "key-pepper"),
    "scheduler": ("nats-scheduler", "postgres-scheduler"),
    "cache": ("nats-cache", "postgres-cache"),
    "materializer": ("nats-materializer", "postgres-materializer", "cluster-key"),
    "loader": ("nats-loader", "nats-worker", "cluster-key"),
}
"""What each service is given. The loader hands its folder to the workers that it spawns."""

_S3 = ("s3-access-key", "s3-secret-key")
_SOURCES = (*_S3, "s3-session-token", "hub-token")
BROUGHT_TO: dict[str, tuple[str, ...]] = {
    "gateway": _SOURCES,
    "materializer": (*_S3, "s3-session-token"),
    "loader": _SOURCES,
}
"""What each service is given besides, where an operator has put it among the secrets: it is for
servers of others."""
HOLDERS: dict[str, tuple[str, ...]] = {
    "gateway": (*SECRETS_OF["gateway"], "admin-key", "api-key", *_S3),
    "scheduler": SECRETS_OF["scheduler"],
    "cache": SECRETS_OF["cache"],
    "materializer": (*SECRETS_OF["materializer"], *_S3),
    "node": (*SECRETS_OF["loader"], *_S3),
    "migrations": (f"nats-{ADMIN}", *(f"postgres-{owner}" for owner in OWNERS), *_S3),
    "postgres": ("postgres-owner",),
    "grafana": ("grafana-admin",),
}
"""What each container is given; beside these, NATS and the S3 server get their configuration and
migrations the owner's ``pgpass``."""

DATABASE_OWNER = "pilotlight"
S3_ACCESS_KEY = "pilotlight"
"""A name more than a secret; the key that proves it is one."""
NATS_STORE = Path("/data")
NATS_MONITOR = "127.0.0.1:8222"
_PREFIXES = {"admin-key": "pl-admin-", "api-key": "pl-api-"}
_GROUP_READS = 0o440
_OWNER_READS = 0o400


def hand_out(folder: Path, store_bytes: int = STORE_BYTES) -> None:
    """Make what is missing and give every holder its own; ``store_bytes`` is what NATS may store.

    Raises:
        OSError: a file cannot be read or written.
    """
    known = folder / "all"
    known.mkdir(exist_ok=True, mode=0o700)
    write_once(known / "s3-access-key", S3_ACCESS_KEY)
    nats = {user: write_once(known / f"nats-{user}", _new("")) for user in NATS_USERS}
    for holder, names in HOLDERS.items():
        content = {name: write_once(known / name, _new(_PREFIXES.get(name, ""))) for name in names}
        brought = (
            name
            for name in BROUGHT_TO.get("loader" if holder == "node" else holder, ())
            if (known / name).is_file()
        )
        _fill(
            folder / holder,
            content | {name: (known / name).read_text().strip() for name in brought},
        )
    owner = (known / "postgres-owner").read_text().strip()
    s3_access, s3_secret = ((known / name).read_text().strip() for name in _S3)
    # libpq takes a password file only when no other user can read it.
    _place(folder / "migrations" / "pgpass", f"*:*:*:{DATABASE_OWNER}:{owner}", _OWNER_READS)
    configured = server_config(
        nats, store_bytes=store_bytes, store_dir=NATS_STORE, monitor=NATS_MONITOR
    )
    _fill(folder / "nats", {"nats-server.conf": configured})
    _fill(folder / "s3", {"s3.json": _s3_identities(s3_access, s3_secret)})


def write_once(path: Path, content: str) -> str:
    """Make a file that its owner alone can read, with its content or not at all, also when two
    processes do it; what it then holds.
    """
    if not path.exists():
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}-"
        ) as unfinished:
            unfinished.write(content + "\n")
            unfinished.flush()
            with contextlib.suppress(FileExistsError):
                os.link(unfinished.name, path)
    return path.read_text().strip()


def _fill(folder: Path, content: Mapping[str, str]) -> None:
    """Let a folder hold exactly this; its group reads it, for servers that run as a user of their
    own.
    """
    folder.mkdir(exist_ok=True, mode=0o750)
    for found in folder.iterdir():
        if found.name not in content:
            found.unlink()
    for name, text in content.items():
        _place(folder / name, text, _GROUP_READS)


def _place(path: Path, text: str, mode: int) -> None:
    """Replace a file whole."""
    making = path.with_name(f".{path.name}.new")
    making.unlink(missing_ok=True)
    with os.fdopen(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text.strip() + "\n")
    making.chmod(mode)
    making.rename(path)


def _new(prefix: str) -> str:
    return prefix + secrets.token_urlsafe(32)


def _s3_identities(access_key: str, secret_key: str) -> str:
    """SeaweedFS's list of identities and their rights."""
    identity = {
        "name": "pilotlight",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    return json.dumps({"identities": [identity]}, indent=2)


def main() -> int:
    """Hand out the secrets below a folder; the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pilotlight.common.credentials", description="Makes and hands out secrets."
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    configure_logging("credentials")
    try:
        hand_out(folder, StreamSettings().store_bytes)
    except (OSError, SettingsInvalid) as error:
        log.error(
            "cannot hand out secrets",
            action="credentials_failed",
            error=str(error),
            folder=str(folder),
        )
        return 1
    log.info("secrets are in place", action="credentials_ready", holders=len(HOLDERS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
