"""Responses that clients go on from: rows of ``gateway.responses``.

A row has the whole conversation up to and with its answer, so that going on reads one row, and
deleting an earlier response takes nothing from a later one. Bounds: bytes of a row, rows of a key,
age (``records.retention``). A key reads its own rows alone.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
from sqlalchemy import delete, desc, insert, select

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import DatabaseUnavailable, NotFound
from pilotlight.gateway.schema.requests import ChatMessage
from pilotlight.gateway.schema.responses import InputItem, Response

log = structlog.get_logger()

MAX_STORED_BYTES = 4 * 1024 * 1024
"""Of one response with its conversation; a longer one is answered and not stored."""
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Kept by one gateway for answers that are being made; past it, answers are not stored."""
SURPLUS_ROWS = 100
"""Rows of a key that go at most when one comes."""


class StoredResponse(msgspec.Struct, kw_only=True):
    """A response, what was asked, and the conversation up to and with its answer.

    What was given stays encoded: it is kept while the answer is made, and that may take long.
    """

    response: Response
    items: msgspec.Raw
    """``InputItem``s."""
    messages: msgspec.Raw
    """``ChatMessage``s before the answer."""
    answer: ChatMessage

    def conversation(self) -> list[ChatMessage]:
        """What the next request goes on from."""
        return [*msgspec.json.decode(self.messages, type=list[ChatMessage]), self.answer]

    def asked(self) -> list[InputItem]:
        """What was asked."""
        return msgspec.json.decode(self.items, type=list[InputItem])


class WaitingRoom:
    """Counts what is kept of requests to be stored with their answers, while those are made."""

    def __init__(self, limit_bytes: int = MAX_WAITING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Whether there is room; then it is taken."""
        if size_bytes > MAX_STORED_BYTES or self.taken_bytes + size_bytes > self._limit_bytes:
            return False
        self.taken_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give it back."""
        self.taken_bytes -= size_bytes


class ResponseStore(Protocol):
    """Where responses are kept."""

    async def put(self, key_id: str, stored: StoredResponse) -> bool:
        """Store one; whether it is stored."""
        ...

    async def get(self, key_id: str, response_id: str) -> StoredResponse:
        """One of a key's.

        Raises:
            NotFound: it has none of this id.
            DatabaseUnavailable: it cannot be said.
        """
        ...

    async def remove(self, key_id: str, response_id: str) -> None:
        """Delete one of a key's.

        Raises:
            NotFound, DatabaseUnavailable: as ``get``.
        """
        ...


@dataclass(frozen=True, slots=True)
class ResponseRepository:
    """As ``ResponseStore``, in PostgreSQL."""

    database: Database
    clock: Clock
    max_per_key: int
    """The newest of each key that are kept."""

    async def put(self, key_id: str, stored: StoredResponse) -> bool:
        """As ``ResponseStore.put``. A database that does not answer costs the client nothing but
        the going on.
        """
        body = msgspec.json.encode(stored)
        response_id = stored.response.id
        if len(body) > MAX_STORED_BYTES:
            log.info("response is not stored", action="response_too_large", response_id=response_id)
            return False
        rows = tables.responses
        of_key = select(rows.c.response_id).where(rows.c.key_id == key_id)
        newest = of_key.order_by(desc(rows.c.created_at), desc(rows.c.response_id))
        surplus = newest.offset(self.max_per_key).limit(SURPLUS_ROWS)
        row = insert(rows).values(
            response_id=response_id,
            key_id=key_id,
            model=stored.response.model,
            created_at=self.clock.wall(),
            body=body,
        )
        try:
            async with self.database.unit_of_work() as work:
                await work.connection.execute(row)
                await work.connection.execute(delete(rows).where(rows.c.response_id.in_(surplus)))
        except DatabaseUnavailable as error:
            log.warning(
                "response is not stored",
                action="response_not_stored",
                response_id=response_id,
                error=error.message,
            )
            return False
        return True

    async def get(self, key_id: str, response_id: str) -> StoredResponse:
        """As ``ResponseStore.get``."""
        rows = tables.responses
        wanted = select(rows.c.body).where(
            rows.c.response_id == response_id, rows.c.key_id == key_id
        )
        async with self.database.reading() as connection:
            body = (await connection.execute(wanted)).scalar_one_or_none()
        if body is None:
            raise no_response(response_id)
        return msgspec.json.decode(body, type=StoredResponse)

    async def remove(self, key_id: str, response_id: str) -> None:
        """As ``ResponseStore.remove``."""
        rows = tables.responses
        gone = delete(rows).where(rows.c.response_id == response_id, rows.c.key_id == key_id)
        async with self.database.unit_of_work() as work:
            if (await work.connection.execute(gone)).rowcount == 0:
                raise no_response(response_id)


def no_response(response_id: str) -> NotFound:
    """The error of an id that the key has no response of."""
    return NotFound(f"there is no response {response_id[:128]!r}", param="response_id")
