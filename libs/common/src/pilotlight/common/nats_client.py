"""A NATS client whose connection comes back whatever ended it.

nats-py holds its connection with four tasks: one reads, one writes, one pings, one makes the next
connection. Whatever it did not foresee ends such a task without an error anywhere: the client is
then cut off for good while the server is well. uvloop brings that about, for it answers a write to
a closed connection with RuntimeError where asyncio says ConnectionResetError. So the tasks have an
owner here, by overriding them: nats-py has no other place for that.

What is short here is done for every request of a client. An answer goes straight to the request
that waits for it: nats-py has it pass a queue and a task, and the request wait with a second
future. So does a request of a served subject go to what answers it, and a message to a listener
that never waits (``at_once``): in the call that brings its bytes (``nats_reading``). What is
published in two turns of the loop is written in the third one, together; nats-py has a queue, a
future and a task for that. Where the server does not keep up, and around a break, everything goes
its way, which waits.
"""

import asyncio
import itertools
import random
import re
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import ParseResult

import nats.errors
import structlog
from nats.aio.client import NO_RESPONDERS_STATUS, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.js.api import Header
from nats.protocol.parser import AWAITING_CONTROL_LINE, PERMISSIONS_ERR

from pilotlight.common.nats_reading import Reader, Take, cut
from pilotlight.common.waiting import Backoff, pause

log = structlog.get_logger()

CLOSE_DEADLINE_S = 2.0
WRITTEN_SOON_BYTES = 64 * 1024
"""Published, and not sent yet: with more, the longer way is taken."""
_BACKOFF = Backoff(first_s=0.05, limit_s=1.0)
_blank = re.compile(r"[ \t\r\n]").search
_HEAD = b"NATS/1.0\r\n"
AtOnce = Callable[[Msg], bool]
"""Takes a message, or leaves it to its subscription."""


class _Lost(nats.errors.Error):
    """The server ended the connection, and said why."""


class _Closed(nats.errors.Error, ConnectionResetError):
    """A write to a connection that is closed already: of the kind that nats-py expects, and of the
    kind that its callers do.
    """


class _Connection(TcpTransport):
    """A connection that says the same of a closed socket on every loop, and hands messages over as
    they come.
    """

    def __init__(self, take: Take) -> None:
        """``take`` is offered what comes, before nats-py is."""
        super().__init__()
        self._take = take

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        loop, where = asyncio.get_running_loop(), (uri.hostname, uri.port)
        reader = Reader(
            buffer_size, lambda data: self._take(data) if self._io_reader is reader else 0
        )
        connecting: Any = loop.create_connection
        async with asyncio.timeout(connect_timeout):
            transport, protocol = await connecting(
                lambda: asyncio.StreamReaderProtocol(reader, loop=loop), *where
            )
        self._bare_io_reader = self._io_reader = reader
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._bare_io_writer = self._io_writer = writer

    def __bool__(self) -> bool:
        # nats-py would put one of its own in the place of one that is false.
        return True

    def write(self, payload: Any) -> None:
        with _closed_is_lost():
            super().write(payload)

    @property
    def unsent_bytes(self) -> int:
        """Written, and still here."""
        writer = self._io_writer
        return 0 if writer is None else writer.transport.get_write_buffer_size()

    def writelines(self, payload: Any) -> None:
        try:
            super().writelines(payload)
        except (RuntimeError, AttributeError) as error:
            raise _Closed(f"the connection is closed: {error}") from error

    async def drain(self) -> None:
        with _closed_is_lost():
            await super().drain()

    def abort(self) -> None:
        """Close at once; what was not sent yet is not waited for, a silent server would never take
        it.
        """
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class KeptClient(Client):
    """``Client`` that reconnects after every end of a connection but ``close``."""

    _rng = random.Random()

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._asked: dict[str, asyncio.Future[Msg]] = {}
        """Requests that wait for an answer, by the last token of its subject."""
        self._writes_soon = False
        """``_write_pending`` is about to run."""
        self._at_once: dict[int, AtOnce] = {}
        """What takes messages of a subscription, by its number."""

    def abandon(self) -> None:
        """Give up the connection as it is."""
        if isinstance(self._transport, _Connection):
            self._transport.abort()

    async def leave(self) -> None:
        """Close, whatever state the connection is in; what it holds for a server that is away is
        lost.
        """
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self.close()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            log.warning(
                "the connection was not closed in order", action="bus_close", error=repr(error)
            )
        finally:
            self.abandon()

    def at_once(self, subscription: Subscription, take: AtOnce) -> None:
        """From now on have a subscription's messages taken as they are read.

        ``take`` must not wait, and says whether it took a message; one that it leaves goes to the
        subscription's callback.
        """
        known: Any = subscription
        self._at_once[known._id] = take

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, Any] | None = None,
    ) -> None:
        if not self.publish_soon(subject, payload, reply, headers):
            await super().publish(subject, payload, reply, headers)

    def publish_soon(
        self,
        subject: str,
        payload: bytes,
        reply: str = "",
        headers: dict[str, Any] | None = None,
    ) -> bool:
        """Have a message written in the turn after the next; False where it has to go the longer
        way: for that it must wait, or be refused.

        Args:
            subject: where to.
            payload: what.
            reply: the subject of its answer; empty: there is none.
            headers: beside it.
        """
        connection = self._transport
        if (
            self._status != Client.CONNECTED
            or not isinstance(connection, _Connection)
            or len(payload) > self._max_payload
            or not subject
            or _blank(subject)
            or _blank(reply)
            or self._pending_data_size + connection.unsent_bytes > WRITTEN_SOON_BYTES
        ):
            return False
        if headers is None:
            head = f"PUB {subject} {reply} {len(payload)}\r\n".encode()
        else:
            lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            if not lines.count("\r") == lines.count("\n") == len(headers):
                return False
            told = f"NATS/1.0\r\n{lines}\r\n".encode()
            sizes = f"{len(told)} {len(told) + len(payload)}"
            head = f"HPUB {subject} {reply} {sizes}\r\n".encode() + told
        command = b"%b%b\r\n" % (head, payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._writes_soon:
            self._writes_soon = True
            loop = asyncio.get_running_loop()
            # A turn later than the next: an answer, and what begins with it, leave together.
            loop.call_soon(loop.call_soon, self._write_pending)
        return True

    def write_now(self) -> None:
        """Write what was published in this turn and the last one."""
        if self._writes_soon:
            self._write_pending()

    def _write_pending(self) -> None:
        """Write what was published; what cannot be stays for the next connection."""
        self._writes_soon = False
        connection = self._transport
        pending = self._pending
        if not pending or not self.is_connected or not isinstance(connection, _Connection):
            return
        try:
            connection.write(pending[0] if len(pending) == 1 else b"".join(pending))
        except OSError:
            # The task that writes finds the same, and has the client reconnect.
            if self._flush_queue is not None and self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        self._pending, self._pending_data_size = [], 0

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if old_style:
            return await super().request(subject, payload, timeout, old_style, headers)
        if self.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        assert self._resp_sub_prefix is not None
        loop, token = asyncio.get_running_loop(), str(next(self._numbers))
        answer = self._asked[token] = loop.create_future()
        try:
            reply_to = self._resp_sub_prefix.decode() + token
            if not self.publish_soon(subject, payload, reply_to, headers):
                await super().publish(subject, payload, reply_to, headers)
            timer = loop.call_later(timeout, _too_late, answer)
            try:
                message = await answer
            finally:
                timer.cancel()
        finally:
            del self._asked[token]
        if message.headers and message.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            raise nats.errors.NoRespondersError
        return message

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if self._deliver(sid, subject, reply, data, headers):
            return
        answers = self._resp_sub_prefix
        if answers is None or not subject.startswith(bytes(answers)):
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        parts: Any = self
        told: Any = await parts._process_headers(headers)
        self._answered(subject, parts._build_message(sid, subject, reply, data, told))

    def _take(self, data: bytes) -> int:
        """Of bytes that came, those that are delivered at once; none where nats-py's parser has a
        part of a message already.
        """
        parser: Any = self._ps
        if parser.buf or parser.state != AWAITING_CONTROL_LINE:
            return 0
        return cut(data, self._deliver)

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> bool:
        """Hand a message to whoever takes it at once; False where nobody does, or where its headers
        are not as ``publish`` writes them.
        """
        if headers and not headers.startswith(_HEAD):
            return False
        take, answers = self._at_once.get(sid), self._resp_sub_prefix
        if take is None and (answers is None or not subject.startswith(bytes(answers))):
            return False
        if take is not None and sid not in self._subs:
            return False
        parts: Any = self
        message: Msg = parts._build_message(sid, subject, reply, data, _told(headers))
        if take is not None:
            return take(message)
        self._answered(subject, message)
        return True

    def _answered(self, subject: bytes, message: Msg) -> None:
        """Give an answer to the request that waits for it, if one does."""
        assert self._resp_sub_prefix is not None
        answer = self._asked.get(subject[len(self._resp_sub_prefix) :].decode())
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._at_once.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None and s.uri.scheme not in ("ws", "wss"):
            self._transport = _Connection(self._take)
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        failures = 0
        while True:
            self.abandon()
            try:
                await super()._attempt_reconnect()
                return
            except (
                Exception
            ):  # whatever it is, without another try this process is cut off for good
                log.exception("reconnecting failed; trying again", action="bus_reconnect_failed")
            if self.is_closed or self._reconnection_task is not asyncio.current_task():
                return
            self._status = Client.RECONNECTING
            await pause(_BACKOFF.delay_s(failures, self._rng))
            failures += 1

    async def _read_loop(self) -> None:
        await self._while_it_lasts(super()._read_loop, "_reading_task")

    async def _flusher(self) -> None:
        await self._while_it_lasts(super()._flusher, "_flusher_task")

    async def _ping_interval(self) -> None:
        await self._while_it_lasts(super()._ping_interval, "_ping_interval_task")

    async def _while_it_lasts(self, work: Callable[[], Awaitable[None]], own: str) -> None:
        """Reconnect when a connection's task, held as ``own``, ends while the connection does not:
        it does its part no more.
        """
        try:
            await work()
        except Exception:  # what ended it does not matter: the next connection is a new one
            log.exception("a task of the connection died", action="bus_task_died")
        if self.is_connected and getattr(self, own) is asyncio.current_task():
            await self._process_op_err(nats.errors.UnexpectedEOF())

    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS_ERR in err_msg:
            await super()._process_err(err_msg)
            return
        # nats-py would close for good: whatever the server minds now (a slow reader, too many
        # connections), it may not mind later.
        error = _Lost("nats: " + err_msg.strip("'"))
        await self._error_cb(error)
        await self._process_op_err(error)


def _told(headers: bytes) -> dict[str, str] | None:
    """Headers as ``publish`` writes them; None where there are none."""
    told: dict[str, str] = {}
    for line in headers[len(_HEAD) :].decode(errors="replace").split("\r\n") if headers else ():
        name, colon, value = line.partition(":")
        if colon:
            told[name] = value.strip()
    return told or None


def _too_late(answer: "asyncio.Future[Msg]") -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())


@contextmanager
def _closed_is_lost() -> Generator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        raise _Closed(f"the connection is closed: {error}") from error
