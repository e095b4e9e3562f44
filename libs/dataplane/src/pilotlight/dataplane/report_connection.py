"""A worker's reports on their way to its node's loader, which passes them on."""

import asyncio
from typing import Protocol

from pilotlight.common.messages.codec import read_frame, write_frame
from pilotlight.common.messages.pool import FromLoader, Relayed, WorkerHere, WorkerSaid

MAX_UNREAD_BYTES = 1 << 20
"""What a loader may leave unread of a worker's reports; more is not sent to it."""


class ReportRelay(Protocol):
    """Gives its reports to the loader while that passes them on."""

    def opened(self, connection: "ReportConnection") -> None:
        """There is a loader."""
        ...

    def on_relayed(self, relayed: Relayed) -> None:
        """The loader has passed on what it was given."""
        ...

    def closed(self) -> None:
        """The loader is gone."""
        ...


class ReportConnection:
    """The way of reports to one loader."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def send(self, message: WorkerSaid | WorkerHere) -> bool:
        """Send; False when the loader does not read, or is gone, and nothing was sent."""
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            return False
        try:
            write_frame(self._writer, message)
        except ConnectionResetError:
            return False
        return True


async def relay_reports(
    reader: asyncio.StreamReader, connection: ReportConnection, relay: ReportRelay
) -> None:
    """Return when the loader is gone."""
    relay.opened(connection)
    try:
        while (told := await read_frame(reader, FromLoader)) is not None:
            if isinstance(told, Relayed):
                relay.on_relayed(told)
    finally:
        relay.closed()
