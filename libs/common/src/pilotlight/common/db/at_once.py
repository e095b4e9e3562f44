"""Statements that are transactions of their own, by the shortest way that there is.

A cold start waits for two of them, and in a cluster that is quiet they run for the first time in
seconds, when each line of code between a caller and the server takes several times as long as
otherwise. So they have a connection of their own, which is in no pool, and the driver is given the
text that they were compiled to once, which the server has planned once.
"""

import asyncio
import select
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, LiteralString, cast

import psycopg
from sqlalchemy import Executable
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.elements import ClauseElement

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
ONE_PLAN = "-c plan_cache_mode=force_generic_plan"
"""An option of such a connection: no plan depends on what a document holds."""


async def connect(*arguments: Any, **options: Any) -> Connection:
    """Connect; when that fails or is given up, hang up at once.

    psycopg leaves the socket to the last owner of the error's frames, often the collector. Until it
    runs the server waits for the rest of the handshake, up to its ``authentication_timeout``, and a
    DROP DATABASE, even of another one, waits for that.

    Raises:
        psycopg.Error: it cannot be reached, or refuses.
    """
    try:
        return await psycopg.AsyncConnection.connect(*arguments, **options)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def has_ended(connection: Connection) -> bool:
    """Whether a connection that is at rest is of no use any more: it has nothing to say but that
    the server ended it. Asking the server would be a round trip.
    """
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


@dataclass(frozen=True, slots=True)
class _Compiled:
    text: LiteralString
    fixed: dict[str, Any]
    """Parameters that are the same each time."""


class AtOnce:
    """One connection that commits by itself, made when it is wanted; statements take turns."""

    def __init__(self, dialect: Dialect, make: Callable[[], Awaitable[Connection]]) -> None:
        """Has no connection yet.

        Args:
            dialect: Of the statements.
            make: Connects, for statements that are not to wait for a commit.
        """
        self._dialect = dialect
        self._make = make
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._compiled: dict[Executable, _Compiled] = {}

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Execute a statement.

        Args:
            statement: One of those that are made once: what it was compiled to is kept.
            parameters: Texts, numbers and lists of them.

        Returns:
            Its rows; what it wrote is committed.

        Raises:
            psycopg.Error: as the driver says.
        """
        compiled = self._compiled.get(statement) or self._compile(statement)
        async with self._turn:
            connection = await self._connected()
            try:
                cursor = await connection.execute(
                    compiled.text, {**compiled.fixed, **parameters}, prepare=True
                )
                return await cursor.fetchall() if cursor.description is not None else []
            except BaseException:
                # Where the statement was given up, nobody knows what the server says next.
                await self._hang_up()
                raise

    async def connect(self) -> None:
        """Have a connection that is of use, before a statement waits for it.

        Raises:
            psycopg.Error: as the driver says.
        """
        async with self._turn:
            await self._connected()

    async def close(self) -> None:
        """Hang up when the statement that is under way has ended."""
        async with self._turn:
            await self._hang_up()

    async def _connected(self) -> Connection:
        connection = self._connection
        if connection is None or has_ended(connection):
            await self._hang_up()
            connection = self._connection = await self._make()
        return connection

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _compile(self, statement: Executable) -> _Compiled:
        made = cast("ClauseElement", statement).compile(dialect=self._dialect)
        # One that is not given is None here, and would be NULL: the driver is to miss it.
        fixed = {name: value for name, value in (made.params or {}).items() if value is not None}
        compiled = _Compiled(cast("LiteralString", made.string), fixed)
        self._compiled[statement] = compiled
        return compiled
