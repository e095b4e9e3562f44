"""Connections and units of work.

A unit of work is one transaction: everything that it wrote is there, with the events that say so,
or nothing is. What must follow a commit (a command, a bucket's new value) is done when the unit of
work has ended. What fits in one statement needs no more than that: it is a transaction of its own,
and one round trip.

A connection is not asked before each use whether it lives, which would be another round trip
(``at_once.has_ended``).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

import msgspec
import psycopg
import structlog
from psycopg.conninfo import make_conninfo
from sqlalchemy import Executable, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from pilotlight.common.clock import Clock
from pilotlight.common.db.at_once import ONE_PLAN, AtOnce, Connection, connect, has_ended
from pilotlight.common.db.documents import document
from pilotlight.common.db.events import EVENTS, Event, event_rows, events_inserted
from pilotlight.common.db.failures import database_error
from pilotlight.common.db.roles import role_of
from pilotlight.common.errors import BadRequest, DatabaseUnavailable, PilotlightError
from pilotlight.common.secret_files import read_secret
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.telemetry import current_traceparent

log = structlog.get_logger()

_NULS = ("NUL (0x00)", "\\u0000")
"""How psycopg, and PostgreSQL in JSON, name what PostgreSQL's texts cannot hold."""
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 10
UNIT_DEADLINE_S = 15.0
"""For a whole unit of work, commit included: nothing waits longer for a database that does not
answer."""
PREPARE_AFTER = 5
"""A statement that a connection has executed so often is prepared: psycopg's own default."""


class Failure(StrEnum):
    """How a database failed a unit of work, or a reading."""

    DEADLINE = "deadline"
    """It did not answer in time."""
    POOL = "pool"
    """Every connection was in use for too long."""
    CONNECTION = "connection"
    """It could not be reached, or ended the connection."""


class UnitOfWork:
    """One transaction that is under way."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.events: list[Event] = []

    def emit(
        self,
        kind: str,
        entity: str,
        data: dict[str, Any] | None = None,
        trace_parent: str | None = None,
    ) -> None:
        """Publish an event when, and only when, this commits.

        Args:
            kind: What happened.
            entity: Its name.
            data: JSON.
            trace_parent: Of what brought it about; None: of the work that is under way.
        """
        parent = current_traceparent() if trace_parent is None else trace_parent
        self.events.append(Event(kind, entity, data or {}, parent))


class Database:
    """One owner's connections to PostgreSQL: a component."""

    def __init__(self, settings: DatabaseSettings, schema: str, clock: Clock) -> None:
        self.schema = schema
        self._clock = clock
        self._url = service_url(settings, schema)
        self._prepare_after = PREPARE_AFTER if settings.database_prepares else None
        self._engine: AsyncEngine = create_async_engine(
            self._url,
            pool_size=settings.database_pool_size,
            max_overflow=0,
            pool_timeout=CONNECT_TIMEOUT_S,
            # The one that was used last: it is the least likely to have been ended since.
            pool_use_lifo=True,
            json_serializer=_to_json,
            json_deserializer=msgspec.json.decode,
            connect_args={
                "async_creator_fn": connect,
                "prepare_threshold": self._prepare_after,
                **self._options(),
            },
        )
        event.listen(self._engine.sync_engine, "checkout", _refuse_ended)
        self._at_once = AtOnce(self._engine.dialect, self._connect_at_once)
        self._new_events = events_inserted(schema)
        self._on_events: list[Callable[[], None]] = []
        self._on_failure: list[Callable[[Failure], None]] = []

    async def start(self) -> None:
        """Check that the database answers.

        Raises:
            DatabaseUnavailable: it does not, or refuses the role.
        """
        async with self.reading() as connection:
            await connection.execute(text("SELECT 1"))

    async def stop(self) -> None:
        """Close every connection."""
        try:
            await self._at_once.close()
        finally:
            await self._engine.dispose()

    def on_events(self, callback: Callable[[], None]) -> None:
        """Call after every commit that left events in the outbox."""
        self._on_events.append(callback)

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """Call for each unit of work, or reading, that ends with ``DatabaseUnavailable``."""
        self._on_failure.append(callback)

    @asynccontextmanager
    async def unit_of_work(self, *, idle_s: float | None = None) -> AsyncGenerator[UnitOfWork]:
        """One transaction: committed when the body ends, rolled back when it raises.

        With ``idle_s`` the server ends it, and frees its locks, when nothing is heard of it for so
        long between two statements: for locks that others wait for, should this process be stopped
        in the middle.

        Raises:
            DatabaseUnavailable: the database cannot be reached or does not answer in time. Nothing
                was written, unless the break came during the commit itself.
            BadRequest: a text holds U+0000, which no row can have.
            sqlalchemy.exc.IntegrityError: a constraint is violated; for the repository to map.
        """
        async with self._connected() as connection, connection.begin():
            work = UnitOfWork(connection)
            if idle_s is not None:
                await connection.execute(
                    text(f"SET LOCAL idle_in_transaction_session_timeout = {round(idle_s * 1000)}")
                )
            yield work
            await self._write_events(work)
        if work.events:
            self._kick()

    async def write_at_once(
        self,
        statement: Executable,
        parameters: Mapping[str, Any],
        events: Sequence[Event] = (),
    ) -> list[tuple[Any, ...]]:
        """Execute one statement that is a transaction of its own, in one round trip.

        Args:
            statement: One that was made once; it has ``events_inserted`` where there are events.
            parameters: Of it: texts, numbers and lists of them.
            events: That it is to leave in the outbox.

        Returns:
            The statement's rows, when all that it wrote is committed.

        Raises:
            DatabaseUnavailable: the database cannot be reached or does not answer in time; once the
                statement was sent, it may be committed all the same.
            BadRequest: as ``unit_of_work``.
            psycopg.IntegrityError: a constraint is violated.
        """
        if events:
            parameters = {**parameters, **self._told(events)}
        async with self._deadline():
            rows = await self._at_once.execute(statement, parameters)
        if events:
            self._kick()
        return rows

    async def connect_ahead(self) -> None:
        """Connect for ``write_at_once`` before something waits for it; where that fails now, the
        next statement connects, or says why it cannot.
        """
        try:
            async with self._deadline():
                await self._at_once.connect()
        except DatabaseUnavailable as error:
            log.info("not connected ahead", action="database_not_ahead", error=error.message)

    def _kick(self) -> None:
        for kick in self._on_events:
            kick()

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncConnection]:
        """A connection that sees one consistent moment and cannot write.

        Raises:
            DatabaseUnavailable, BadRequest: as ``unit_of_work``.
        """
        async with self._connected() as connection:
            await connection.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
            async with connection.begin():
                yield connection

    @asynccontextmanager
    async def asking(self) -> AsyncGenerator[AsyncConnection]:
        """A connection on which each statement is a transaction of its own: for one that reads.

        Raises:
            DatabaseUnavailable, BadRequest: as ``unit_of_work``.
        """
        async with self._connected() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            yield connection

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[AsyncConnection]:
        async with self._deadline(), self._engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def _deadline(self) -> AsyncGenerator[None]:
        """For what is asked of the database; says in our words what goes wrong with it."""
        deadline = asyncio.timeout(UNIT_DEADLINE_S)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise self._failed(
                Failure.DEADLINE, f"the database did not answer within {UNIT_DEADLINE_S:g} s"
            ) from error
        except PoolTimeoutError as error:
            raise self._failed(
                Failure.POOL, "every connection to the database is in use"
            ) from error
        except DBAPIError as error:
            # A connection that the server ended may be told of by any of them.
            meant = self._meaning(error.orig, is_lost=error.connection_invalidated)
            if meant is None:
                raise
            raise meant from error
        except psycopg.Error as error:
            meant = self._meaning(error)
            if meant is None:
                raise
            raise meant from error

    def _meaning(
        self, error: BaseException | None, *, is_lost: bool = False
    ) -> PilotlightError | None:
        """What one of the driver's errors stands for; None: what it says itself."""
        if isinstance(error, psycopg.DataError) and any(nul in str(error) for nul in _NULS):
            return BadRequest("a text holds U+0000, which is in nothing that is stored")
        if is_lost or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            self._tell(Failure.CONNECTION)
            return database_error("the database failed", error)
        return None

    def _failed(self, how: Failure, message: str) -> DatabaseUnavailable:
        self._tell(how)
        return DatabaseUnavailable(message)

    def _tell(self, how: Failure) -> None:
        for tell in self._on_failure:
            tell(how)

    async def _write_events(self, work: UnitOfWork) -> None:
        if not work.events:
            return
        await work.connection.execute(self._new_events, self._told(work.events))

    def _told(self, events: Sequence[Event]) -> dict[str, str]:
        return document(event_rows(events, self._clock.wall()), EVENTS)

    def _options(self, more: str = "") -> dict[str, Any]:
        limits = f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c idle_in_transaction_session_timeout=60s"
        return {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": f"pilotlight-{self.schema}",
            "options": f"{limits} {more}".rstrip(),
        }

    async def _connect_at_once(self) -> Connection:
        told = conninfo_of(self._url, **self._options(ONE_PLAN))
        connection = await connect(told, autocommit=True)
        connection.prepare_threshold = self._prepare_after
        return connection


def _refuse_ended(connection: Any, record: Any, _fairy: object) -> None:
    """Before a connection of the pool is used again; a new one says itself what is wrong with it.

    Raises:
        InvalidatePoolError: the server ended it; all that the pool has are then made anew.
    """
    if not record.fresh and has_ended(connection.driver_connection):
        raise InvalidatePoolError


def service_url(settings: DatabaseSettings, schema: str) -> URL:
    """The database's URL with the owner's role and password, where the setting does not name
    them.
    """
    url = make_url(settings.database_url).set(drivername="postgresql+psycopg")
    if url.username is None:
        url = url.set(username=role_of(schema))
    if url.password is None:
        url = url.set(password=read_secret(settings.secrets_dir, f"postgres-{schema}"))
    return url


def conninfo_of(url: URL, **more: Any) -> str:
    """A URL as psycopg wants it, with more parameters, or others in the place of its own."""
    return make_conninfo(**{**url.get_dialect()().create_connect_args(url)[1], **more})


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
