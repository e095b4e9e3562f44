"""Whether servers of the user's own, in the place of the embedded ones, let us in: looked at by
``up`` and by ``doctor``.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import psycopg
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from pilotlight.cli.home import Home
from pilotlight.common.db.failures import database_error
from pilotlight.common.errors import NotFound, SettingsInvalid, SourceDenied
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.natsconf import ADMIN
from pilotlight.common.settings import BusSettings, S3Settings
from pilotlight.common.store import ObjectStore

CONNECT_TIMEOUT_S = 10
NO_SUCH_KEY = "manifests/none.json"


def server_looks(home: Home, environment: Mapping[str, str]) -> dict[str, Callable[[], str]]:
    """A check for each server that the environment names.

    They block, and start event loops of their own.
    """
    database, bus, store = (
        environment.get(f"PILOTLIGHT_{name}_URL") for name in ("DATABASE", "NATS", "OBJECT_STORE")
    )
    found: dict[str, Callable[[], str]] = {}
    if database:
        found["database"] = lambda: look_at_database(database)
    # Before the first start there are no passwords that the server could know.
    if bus and (home.secrets.is_dir() or "@" in bus):
        found["NATS"] = lambda: asyncio.run(look_at_bus(home, bus))
    if store and store.startswith("s3://"):
        found["object store"] = lambda: asyncio.run(look_at_store(home, store))
    return found


def look_at_database(url: str) -> str:
    """Connect as the database's owner.

    Raises:
        DatabaseUnavailable: it cannot be reached, or refuses.
        SettingsInvalid: the URL is none.
    """
    try:
        plain = make_url(url).set(drivername="postgresql+psycopg")
        # Not as text: a password may hold characters that its place in a URL reads differently in
        # each library.
        arguments, options = plain.get_dialect()().create_connect_args(plain)
    except (ArgumentError, ValueError) as error:
        raise SettingsInvalid(
            "PILOTLIGHT_DATABASE_URL is not the URL of a database: postgresql://user:password@host/name"
        ) from error
    shown = plain.set(drivername="postgresql").render_as_string()
    try:
        with psycopg.connect(*arguments, **{**options, "connect_timeout": CONNECT_TIMEOUT_S}):
            return f"{shown} answers"
    except psycopg.OperationalError as error:
        raise database_error(f"cannot connect to {shown}", error) from error
    except psycopg.ProgrammingError as error:
        raise SettingsInvalid(f"PILOTLIGHT_DATABASE_URL, {shown}: {error}") from error


async def look_at_bus(home: Home, url: str) -> str:
    """Connect as the user that makes the streams.

    Raises:
        BusUnavailable: NATS cannot be reached, or refuses.
    """
    settings = BusSettings(nats_url=url, secrets_dir=home.secrets)
    bus = await NatsBus.connect(settings, user=ADMIN, name="look")
    await bus.close()
    return "the server of PILOTLIGHT_NATS_URL answers"


async def look_at_store(home: Home, url: str) -> str:
    """Ask for an object that is not there.

    Raises:
        SourceUnavailable: the server cannot be reached, or refuses the credentials.
    """
    store = ObjectStore.from_url(url, S3Settings(secrets_dir=home.secrets))
    try:
        with contextlib.suppress(NotFound):
            await store.get(NO_SUCH_KEY)
    except SourceDenied as error:
        # An account that may not list a bucket is told so of what is not there, with credentials
        # that are right.
        if "AccessDenied" not in error.message:
            raise
    return f"{url} answers"
