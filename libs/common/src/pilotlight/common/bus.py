"""The bus: request/reply with deadlines, notifications, events and last-value buckets on NATS.

Everything that crosses it carries W3C trace context and the time that is left in its headers. Subjects carry the major version
(``v1.…``). ``Bus`` is what services see; ``NatsBus`` is the real one, tests wrap it to drop, delay and repeat messages.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import nats
import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from pilotlight.common.buckets import Bucket, NatsBucket
from pilotlight.common.errors import (
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    MessageTooLarge,
    MessageUndecodable,
    PilotlightError,
    QueueFull,
    error_of,
)
from pilotlight.common.messages.codec import MAX_PAYLOAD_BYTES, decode_json, decode_msgpack, encode_json, encode_msgpack
from pilotlight.common.settings import BusSettings
from pilotlight.common.telemetry import client_span, inject, server_span

log = structlog.get_logger()

DEADLINE_HEADER = "Pilotlight-Deadline-Ms"
"""Time that the sender still waits: relative, because hosts share no clock."""
ERROR_HEADER = "Pilotlight-Error"
"""On a reply: the error's code. The body is then its message."""
RETRY_HEADER = "Pilotlight-Retry-After-S"
MAX_CONCURRENT_REQUESTS = 512
"""Requests that one served subject works on at a time; more are refused with ``queue_full``."""

T = TypeVar("T")
Req = TypeVar("Req")
Handler = Callable[[Req], Awaitable[object]]
Listener = Callable[[Req], Awaitable[None]]


class Subscription(Protocol):
    """Something that delivers until it is ended."""

    async def end(self) -> None:
        """Deliver no more. What is being handled goes on to its end."""
        ...


@runtime_checkable
class Bus(Protocol):
    """What services see of NATS."""

    @property
    def connected(self) -> bool:
        """False while the server cannot be reached."""
        ...

    async def publish(self, subject: str, message: object, *, binary: bool = False) -> None:
        """Send a notification. It may be lost; whoever needs it reconciles.

        Raises:
            MessageTooLarge: it is beyond the bus's limit.
        """
        ...

    async def request(self, subject: str, message: object, reply_type: type[T], *, deadline_s: float) -> T:
        """Send a request and wait for its reply.

        Raises:
            DeadlineExceeded: no reply in time. The request may have been carried out.
            BusUnavailable: nobody serves the subject, or the server cannot be reached.
            MessageTooLarge: the request is beyond the bus's limit.
            PilotlightError: what the server of the subject raised.
        """
        ...

    async def serve(self, subject: str, request_type: type[Req], handler: Handler[Req], *, queue: str = "") -> Subscription:
        """Answer requests, several at a time. What ``handler`` raises reaches the requester as the same error."""
        ...

    async def subscribe(
        self, subject: str, message_type: type[Req], listener: Listener[Req], *, queue: str = "", binary: bool = False
    ) -> Subscription:
        """Listen to notifications, one after the other, in order."""
        ...

    async def publish_event(self, subject: str, event_id: str, message: object) -> None:
        """Store an event in the stream; a repeated ``event_id`` is stored once.

        Raises:
            BusUnavailable: the stream did not confirm.
        """
        ...

    async def bucket(self, name: str) -> Bucket:
        """A last-value bucket; made when it does not exist."""
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call after each reconnect: ask for what was missed, publish what is held."""
        ...

    async def close(self) -> None:
        """Send what is buffered and leave."""
        ...


class NatsBus:
    """``Bus`` on nats-py."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, settings: BusSettings, *, user: str, name: str) -> "NatsBus":
        """Connect as one service's user.

        Raises:
            BusUnavailable: the server cannot be reached or refuses the credentials.
        """
        client = Client()
        bus = cls(client, settings.prefix)
        password = settings.password_of(user)
        try:
            await client.connect(
                servers=[settings.nats_url],
                name=name,
                user=user if password else None,
                password=password,
                inbox_prefix=f"_INBOX.{user}".encode(),
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1,
                connect_timeout=2,
                ping_interval=5,
                allow_reconnect=True,
                error_cb=bus._on_error,
                disconnected_cb=bus._on_disconnect,
                reconnected_cb=bus._on_reconnect,
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise BusUnavailable(f"cannot connect to {settings.nats_url} as {user}: {error}") from error
        return bus

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._reconnect_callbacks.append(callback)

    async def publish(self, subject: str, message: object, *, binary: bool = False) -> None:
        data = encode_msgpack(message) if binary else encode_json(message)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise MessageTooLarge(f"a message of {len(data)} bytes; at most {MAX_PAYLOAD_BYTES} are taken")
        try:
            await self._client.publish(self._prefix + subject, data, headers=inject({}) or None)
        except nats.errors.Error as error:
            # A notification that cannot be sent is a lost notification: its reader reconciles.
            log.warning("notification lost", action="bus_publish_failed", subject=subject, error=str(error))

    async def request(self, subject: str, message: object, reply_type: type[T], *, deadline_s: float) -> T:
        data = encode_json(message)
        with client_span(f"request {_family(subject)}"):
            headers = inject({DEADLINE_HEADER: str(int(deadline_s * 1000))})
            try:
                reply = await self._client.request(self._prefix + subject, data, timeout=deadline_s, headers=headers)
            except nats.errors.NoRespondersError as error:
                raise BusUnavailable(f"nobody answers on {subject}") from error
            except (nats.errors.TimeoutError, TimeoutError) as error:
                raise DeadlineExceeded(f"no answer on {subject} within {deadline_s:g} s") from error
            except (nats.errors.Error, OSError) as error:
                raise BusUnavailable(f"cannot send on {subject}: {error}") from error
            code = (reply.headers or {}).get(ERROR_HEADER)
            if code is not None:
                retry = (reply.headers or {}).get(RETRY_HEADER)
                raise error_of(code, reply.data.decode(), float(retry) if retry else None)
            return decode_json(reply.data, reply_type)

    async def serve(self, subject: str, request_type: type[Req], handler: Handler[Req], *, queue: str = "") -> Subscription:
        running: set[asyncio.Task[None]] = set()

        async def on_message(msg: Msg) -> None:
            if len(running) >= MAX_CONCURRENT_REQUESTS:
                await self._reply_error(msg, QueueFull(f"{subject} has {len(running)} requests under way"))
                return
            task = asyncio.create_task(self._answer(msg, subject, request_type, handler), name=f"serve {subject}")
            running.add(task)
            self._tasks.add(task)
            task.add_done_callback(running.discard)
            task.add_done_callback(self._tasks.discard)

        return _Ending(await self._client.subscribe(self._prefix + subject, queue=queue, cb=on_message))

    async def subscribe(
        self, subject: str, message_type: type[Req], listener: Listener[Req], *, queue: str = "", binary: bool = False
    ) -> Subscription:
        async def on_message(msg: Msg) -> None:
            try:
                message = decode_msgpack(msg.data, message_type) if binary else decode_json(msg.data, message_type)
            except MessageUndecodable as error:
                log.error("message dropped", action="bus_undecodable", subject=msg.subject, error=error.message)
                return
            with server_span(f"receive {_family(subject)}", msg.headers, record=False):
                try:
                    await listener(message)
                except PilotlightError as error:
                    log.warning("listener refused", action="bus_listener_refused", subject=subject, error=error.message)
                except Exception:  # a listener's bug must not end the subscription that all others share
                    log.exception("listener failed", action="bus_listener_failed", subject=subject)

        return _Ending(await self._client.subscribe(self._prefix + subject, queue=queue, cb=on_message))

    async def publish_event(self, subject: str, event_id: str, message: object) -> None:
        headers = inject({"Nats-Msg-Id": event_id})
        try:
            stream = self._client.jetstream(timeout=2.0)
            await stream.publish(self._prefix + subject, encode_json(message), headers=headers)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(f"the event stream did not confirm {subject}: {error}") from error

    async def bucket(self, name: str) -> Bucket:
        return await NatsBucket.open(self._client, (self._prefix + name).replace(".", "_"))

    async def close(self) -> None:
        if self._client.is_closed:
            return
        try:
            async with asyncio.timeout(2.0):
                await self._client.drain()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            log.warning("left the bus without draining", action="bus_close", error=str(error))
            await self._client.close()

    async def _answer(self, msg: Msg, subject: str, request_type: type[Req], handler: Handler[Req]) -> None:
        deadline_s = _deadline_s(msg)
        try:
            with server_span(f"serve {_family(subject)}", msg.headers):
                request = decode_json(msg.data, request_type)
                async with asyncio.timeout(deadline_s):
                    reply = await handler(request)
            await msg.respond(encode_json(reply))
        except TimeoutError:
            # The requester has given up at the same moment: there is nobody to answer.
            log.warning("request outlived its deadline", action="bus_deadline", subject=subject, deadline_s=deadline_s)
        except PilotlightError as error:
            await self._reply_error(msg, error)
        except nats.errors.Error as error:
            log.warning("reply lost", action="bus_reply_failed", subject=subject, error=str(error))
        except Exception:  # the requester must hear of a bug at once, not by its deadline
            log.exception("handler failed", action="bus_handler_failed", subject=subject)
            await self._reply_error(msg, InternalError(f"the handler of {subject} failed; see its log"))

    async def _reply_error(self, msg: Msg, error: PilotlightError) -> None:
        if not msg.reply:
            return
        headers = {ERROR_HEADER: error.code}
        if error.retry_after_s is not None:
            headers[RETRY_HEADER] = f"{error.retry_after_s:g}"
        try:
            await self._client.publish(msg.reply, error.message.encode(), headers=headers)
        except nats.errors.Error as failure:
            log.warning("reply lost", action="bus_reply_failed", error=str(failure))

    async def _on_error(self, error: Exception) -> None:
        log.warning("bus error", action="bus_error", error=repr(error))

    async def _on_disconnect(self) -> None:
        log.warning("bus disconnected", action="bus_disconnected")

    async def _on_reconnect(self) -> None:
        log.info("bus reconnected", action="bus_reconnected")
        for callback in self._reconnect_callbacks:
            task = asyncio.create_task(_logged(callback), name="after reconnect")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class _Ending:
    def __init__(self, subscription: NatsSubscription) -> None:
        self._subscription = subscription

    async def end(self) -> None:
        try:
            await self._subscription.unsubscribe()
        except nats.errors.Error:
            log.debug("subscription was already closed", action="bus_unsubscribe")


async def _logged(callback: Callable[[], Awaitable[None]]) -> None:
    try:
        await callback()
    except Exception:  # one component's failure must not keep the others from resyncing
        log.exception("resync after a reconnect failed", action="bus_resync_failed")


def _family(subject: str) -> str:
    """The subject with ids left out: names of spans must be few."""
    return ".".join("*" if "-" in token and any(c.isdigit() for c in token) else token for token in subject.split("."))


def _deadline_s(msg: Msg) -> float:
    value: Any = (msg.headers or {}).get(DEADLINE_HEADER)
    try:
        return max(0.001, int(value) / 1000)
    except (TypeError, ValueError):
        return 30.0
