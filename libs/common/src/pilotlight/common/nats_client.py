"""A NATS client whose connection comes back whatever ended it.

nats-py holds its connection with four tasks: one reads, one writes, one pings, one makes the next
connection. Whatever it did not foresee ends such a task without an error anywhere: the client is
then cut off for good while the server is well. uvloop brings that about, for it answers a write to
a closed connection with RuntimeError where asyncio says ConnectionResetError. So the tasks have an
owner here, by overriding them: nats-py has no other place for that.

An answer goes straight to the request that waits for it. nats-py has it pass a queue and a task,
and the request wait with a second future: together twice the work of all else that a request does.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.parser import PERMISSIONS_ERR

from pilotlight.common.waiting import Backoff, pause

log = structlog.get_logger()

CLOSE_DEADLINE_S = 2.0
_BACKOFF = Backoff(first_s=0.05, limit_s=1.0)


class _Lost(nats.errors.Error):
    """The server ended the connection, and said why."""


class _Closed(nats.errors.Error, ConnectionResetError):
    """A write to a connection that is closed already: of the kind that nats-py expects, and of the
    kind that its callers do.
    """


class _Connection(TcpTransport):
    """A connection that says the same of a closed socket on every loop."""

    def __bool__(self) -> bool:
        # nats-py would put one of its own in the place of one that is false.
        return True

    def write(self, payload: Any) -> None:
        with _closed_is_lost():
            super().write(payload)

    def writelines(self, payload: Any) -> None:
        with _closed_is_lost():
            super().writelines(payload)

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

    async def _request_new_style(
        self,
        subject: str,
        payload: bytes,
        timeout: float = 1,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if self.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        assert self._resp_sub_prefix is not None
        loop, token = asyncio.get_running_loop(), str(next(self._numbers))
        answer = self._asked[token] = loop.create_future()
        try:
            reply_to = self._resp_sub_prefix.decode() + token
            await self.publish(subject, payload, reply=reply_to, headers=headers)
            timer = loop.call_later(timeout, _too_late, answer)
            try:
                return await answer
            finally:
                timer.cancel()
        finally:
            del self._asked[token]

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        answers = self._resp_sub_prefix
        if answers is None or not subject.startswith(bytes(answers)):
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        parts: Any = self
        told: Any = await parts._process_headers(headers)
        answer = self._asked.get(subject[len(answers) :].decode())
        if answer is not None and not answer.done():
            answer.set_result(parts._build_message(sid, subject, reply, data, told))

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None and s.uri.scheme not in ("ws", "wss"):
            self._transport = _Connection()
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


def _too_late(answer: "asyncio.Future[Msg]") -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())


@contextmanager
def _closed_is_lost() -> Generator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        raise _Closed(f"the connection is closed: {error}") from error
