"""``Bus`` on nats-py."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from pilotlight.common.buckets import Bucket, NatsBucket, jetstream, write_failure
from pilotlight.common.bus import (
    AtOnceHandler,
    AtOnceListener,
    Handler,
    Listener,
    Subscription,
    subject_family,
)
from pilotlight.common.envelope import stamped
from pilotlight.common.errors import (
    BusDenied,
    BusUnavailable,
    DeadlineExceeded,
    MessageTooLarge,
    error_of,
)
from pilotlight.common.messages.codec import (
    MAX_PAYLOAD_BYTES,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
)
from pilotlight.common.nats_answers import DEADLINE_HEADER, ERROR_HEADER, RETRY_HEADER, Answers
from pilotlight.common.nats_client import AtOnce, KeptClient
from pilotlight.common.nats_servers import servers_of
from pilotlight.common.nats_subscription import BusSubscription, hear, hear_at_once, told_by
from pilotlight.common.pulse import Pulse
from pilotlight.common.settings import BusSettings
from pilotlight.common.telemetry import client_span, inject, server_span
from pilotlight.common.waiting import cancel_all
from pilotlight.common.write_check import WriteCheck
from pilotlight.policy.phase import Moment

log = structlog.get_logger()

MAX_QUEUED_NOTIFICATIONS = 65536
"""Notifications of one subscription that wait for its listener; more are lost."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
HEADERS_ROOM_BYTES = 4096
"""What is left for headers: the server counts them too, and ends the connection of a client that
sends more."""
CONNECT_DEADLINE_S = 10.0
SUBSCRIBE_DEADLINE_S = 2.0

T = TypeVar("T")
Req = TypeVar("Req")


class NatsBus:
    """One process's connection to NATS."""

    def __init__(self, prefix: str, user: str) -> None:
        self._client = KeptClient()
        self._stream = jetstream(self._client)
        self._prefix = prefix
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._buckets: dict[str, NatsBucket] = {}
        self._subscriptions: set[BusSubscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = asyncio.Event()
        self._pulse = Pulse(self._client)
        self._writes = WriteCheck(self, user)
        self._refused: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, settings: BusSettings, *, user: str, name: str) -> "NatsBus":
        """Connect as one service's user; waits a little for a server that is just starting.

        Raises:
            BusUnavailable: the server cannot be reached.
            BusDenied: it refuses the credentials.
        """
        bus = cls(settings.prefix, user)
        connecting = asyncio.create_task(bus._connect(settings, user, name))
        await asyncio.wait(
            {connecting, bus._refused},
            timeout=CONNECT_DEADLINE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if connecting.done() and connecting.exception() is None:
            bus._up.set()
            bus._pulse.start()
            return bus
        await cancel_all((connecting,))
        await bus._client.leave()
        server = servers_of(settings, user)
        if bus._refused.done():
            named = server.named(user, settings)
            raise BusDenied(f"{server.url} refuses a connection {named}: {bus._refused.result()}")
        raise BusUnavailable(
            f"cannot connect to {server.url} as {user}: {bus._client.last_error or 'no answer'}"
        )

    async def _connect(self, settings: BusSettings, user: str, name: str) -> None:
        server = servers_of(settings, user)
        options: dict[str, Any] = {
            "servers": list(server.urls),
            "name": name,
            "user": server.user,
            "password": server.password,
            "inbox_prefix": f"_INBOX.{user}",
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": random.Random().uniform(0.05, 0.15),
            "connect_timeout": 2,
            "ping_interval": 2,
            "pending_size": 2 * MAX_PAYLOAD_BYTES,
            "flush_timeout": 2.0,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnect,
            "reconnected_cb": self._on_reconnect,
        }
        await self._client.connect(**options)

    @property
    def client(self) -> Client:
        """The connection itself, for what the bus does not offer: making streams."""
        return self._client

    @property
    def task(self) -> asyncio.Task[None] | None:
        """What runs while the bus is open, for the process to own: ``connected`` ends with it."""
        return self._pulse.task

    @property
    def connected(self) -> bool:
        return self._up.is_set() and self._client.is_connected and self._pulse.beats

    @property
    def unwritable(self) -> str | None:
        return self._writes.reason

    async def check_writes(self) -> None:
        """Look for ever whether what is written is stored, for ``unwritable``."""
        await self._writes.run()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._reconnect_callbacks.append(callback)

    async def publish(
        self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None
    ) -> None:
        data = self._fitting(encode_msgpack(message) if binary else encode_json(message))
        try:
            await self._client.publish(
                self._prefix + subject, data, headers=stamped(inject({}), sent) or None
            )
        except nats.errors.Error as error:
            # A notification that cannot be sent is a lost notification: its reader reconciles.
            log.warning(
                "notification lost", action="bus_publish_failed", subject=subject, error=str(error)
            )

    async def request(
        self, subject: str, message: object, reply_type: type[T], *, deadline_s: float
    ) -> T:
        data = self._fitting(encode_json(message))
        with client_span(f"request {subject_family(subject)}"):
            reply = await self._exchange(subject, data, deadline_s)
            headers = reply.headers or {}
            code = headers.get(ERROR_HEADER)
            if code is not None:
                retry = headers.get(RETRY_HEADER)
                raise error_of(
                    code, reply.data.decode(errors="replace"), float(retry) if retry else None
                )
            return decode_json(reply.data, reply_type)

    def publish_soon(
        self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None
    ) -> bool:
        data = self._fitting(encode_msgpack(message) if binary else encode_json(message))
        headers = stamped(inject({}), sent) or None
        return self._client.publish_soon(self._prefix + subject, data, headers=headers)

    def write_now(self) -> None:
        self._client.write_now()

    async def serve(
        self,
        subject: str,
        request_type: type[Req],
        handler: Handler[Req],
        *,
        queue: str = "",
        at_once: AtOnceHandler[Req] | None = None,
        pressing: bool = False,
    ) -> Subscription:
        subscribed, connection = BusSubscription(self._subscriptions), (self._client, self._fitting)
        answers = Answers(*connection, subject, request_type, handler, at_once, pressing=pressing)
        return await self._subscribe(
            subject, queue, answers.to(subscribed), subscribed, answers.at_once(subscribed)
        )

    async def subscribe(
        self,
        subject: str,
        message_type: type[Req],
        listener: Listener[Req],
        *,
        queue: str = "",
        binary: bool = False,
    ) -> Subscription:
        subscribed = BusSubscription(self._subscriptions)
        decode = decode_msgpack if binary else decode_json

        async def on_message(msg: Msg) -> None:
            for message in told_by(msg, message_type, decode):
                with subscribed as wanted, server_span("", msg.headers, record=False):
                    if wanted:
                        await hear(listener, message, subject)

        return await self._subscribe(subject, queue, on_message, subscribed)

    async def hear(
        self,
        subject: str,
        message_type: type[Req],
        listener: AtOnceListener[Req],
        *,
        binary: bool = False,
    ) -> Subscription:
        subscribed = BusSubscription(self._subscriptions)
        decode = decode_msgpack if binary else decode_json

        def take(msg: Msg) -> bool:
            for message in () if subscribed.ended else told_by(msg, message_type, decode):
                with server_span("", msg.headers, record=False):
                    hear_at_once(listener, message, subject)
            return True

        async def on_message(msg: Msg) -> None:
            take(msg)

        return await self._subscribe(subject, "", on_message, subscribed, take)

    async def publish_event(self, subject: str, event_id: str, message: object) -> None:
        data = self._fitting(encode_json(message))
        headers = inject({"Nats-Msg-Id": event_id})
        try:
            await self._stream.publish(self._prefix + subject, data, headers=headers)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise write_failure(f"the event {subject} is not stored", error) from error

    async def bucket(self, name: str) -> Bucket:
        full_name = bucket_name(self._prefix, name)
        known = self._buckets.get(full_name)
        if known is None:
            opened = NatsBucket(self._client, full_name, self.on_reconnect)
            await opened.open()
            known = self._buckets.setdefault(full_name, opened)
        return known

    async def close(self) -> None:
        if self._client.is_closed:
            return
        await asyncio.gather(*(subscribed.end() for subscribed in list(self._subscriptions)))
        await cancel_all(self._tasks)
        self._up.clear()
        try:
            async with asyncio.timeout(2.0):
                await self._client.drain()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            log.warning("left the bus without draining", action="bus_close", error=repr(error))
        finally:
            await self._client.leave()
            # Not before: an answer without a waiting request ends the reading, and with it the
            # draining.
            await self._pulse.stop()

    async def _subscribe(
        self,
        subject: str,
        queue: str,
        on_message: Callable[[Msg], Awaitable[None]],
        subscribed: "BusSubscription",
        take: AtOnce | None = None,
    ) -> "BusSubscription":
        """``take`` takes messages as they are read; those that it leaves go to ``on_message``."""
        client: Any = self._client
        try:
            subscription = subscribed.subscription = await client.subscribe(
                self._prefix + subject,
                queue=queue,
                cb=on_message,
                pending_msgs_limit=MAX_QUEUED_NOTIFICATIONS,
                pending_bytes_limit=MAX_QUEUED_BYTES,
            )
            if take is not None:
                self._client.at_once(subscription, take)
            # A round trip, so that a client that hears that we serve finds us serving.
            await self._pulse.round_trip(SUBSCRIBE_DEADLINE_S)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            # It would be made all the same when the server is back, for a caller that was told that
            # it is not.
            await subscribed.end()
            raise BusUnavailable(f"cannot subscribe to {subject}: {error!r}") from error
        return subscribed

    async def _exchange(self, subject: str, data: bytes, deadline_s: float) -> Msg:
        left_s = deadline_s
        if not self._client.is_connected:
            # The word of the break comes a moment after it.
            self._up.clear()
        if not self._up.is_set():
            clock = asyncio.get_running_loop()
            until_s = clock.time() + deadline_s
            try:
                # While there is no connection nothing is sent: a request that leaves after its
                # deadline is worse than none.
                async with asyncio.timeout_at(until_s):
                    await self._up.wait()
            except TimeoutError as error:
                raise BusUnavailable(
                    f"NATS cannot be reached, so nobody was asked on {subject}"
                ) from error
            left_s = max(0.001, until_s - clock.time())
        headers = inject({DEADLINE_HEADER: str(max(1, int(left_s * 1000)))})
        try:
            return await self._client.request(
                self._prefix + subject, data, timeout=left_s, headers=headers
            )
        except nats.errors.NoRespondersError as error:
            raise BusUnavailable(f"nobody answers on {subject}") from error
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise DeadlineExceeded(f"no answer on {subject} within {deadline_s:g} s") from error
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"cannot send on {subject}: {error!r}") from error

    def _fitting(self, data: bytes) -> bytes:
        limit = min(MAX_PAYLOAD_BYTES, self._client.max_payload) - HEADERS_ROOM_BYTES
        if len(data) > limit:
            raise MessageTooLarge(f"a message of {len(data)} bytes; at most {limit} are taken")
        return data

    async def _on_error(self, error: Exception) -> None:
        reconnecting: Any = self._client._reconnection_task  # pyright: ignore[reportPrivateUsage] - nats-py has no public name for it
        if reconnecting is asyncio.current_task():
            # A try to reconnect has failed: nats-py opens the next connection without closing this
            # one.
            self._client.abandon()
        self._writes.hear(error)
        if (
            isinstance(error, nats.errors.AuthorizationError)
            or "authorization violation" in str(error).lower()
        ):
            if not self._refused.done():
                self._refused.set_result(error)
        elif self._client.is_connected:
            # While there is no connection each of many tries ends here, and the break itself has
            # been logged.
            log.warning("bus error", action="bus_error", error=repr(error))

    async def _on_disconnect(self) -> None:
        self._up.clear()
        self._pulse.lost()
        if not self._client.is_closed:
            log.warning("bus disconnected", action="bus_disconnected")

    async def _on_reconnect(self) -> None:
        self._pulse.answered()
        self._up.set()
        log.info("bus reconnected", action="bus_reconnected")
        for callback in self._reconnect_callbacks:
            task = asyncio.create_task(_logged(callback), name="after reconnect")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _logged(callback: Callable[[], Awaitable[None]]) -> None:
    try:
        await callback()
    except Exception:  # one component's failure must not keep the others from resyncing
        log.exception("resync after a reconnect failed", action="bus_resync_failed")


def bucket_name(prefix: str, name: str) -> str:
    """A bucket's name on the server."""
    return (prefix + name).replace(".", "_")
