"""Last-value buckets (NATS KV): the last state of every gateway, node, worker, instance and copy,
and the leader, for late joiners.

Written on change, without TTL. An empty bucket says nothing: absence is never deletion.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, KeyValueConfig
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE

from pilotlight.common.envelope import opened, stamped
from pilotlight.common.errors import (
    BadRequest,
    BusFull,
    BusUnavailable,
    Conflict,
    MessageUndecodable,
)
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.nats_client import KeptClient
from pilotlight.common.waiting import Backoff, pause
from pilotlight.policy.phase import Moment

log = structlog.get_logger()

GATEWAYS = "gateways"
INSTANCES = "instances"
COPIES = "copies"
NODES = "nodes"
WORKERS = "workers"
LEADER = "leader"
HEALTH = "health"
"""Written to see whether what is written is stored, by every process under its service's name;
schedulers read there which reports are understood."""

DEADLINE_S = 3.0
"""For one answer of the server."""
HEARTBEAT_S = 2.0
SILENCE_S = 3 * HEARTBEAT_S
"""A watch that hears neither values nor heartbeats for so long starts anew."""
CONSUMER_LINGERS_S = 10.0
"""How long the server keeps what a broken watch left there."""
MAX_QUEUED = 8192
"""Changes that wait for a watcher; past it the watch starts anew, and gets last values instead of
each change."""

T = TypeVar("T")
OnChange = Callable[[str, T | None], Awaitable[None]]
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_WRONG_SEQUENCE = (10071, 10164)
_NO_STREAM = 10059
_OUT_OF_ROOM = (10023, 10028, 10047, 10077)
"""`insufficient resources`, and the like of memory, of storage, and of one write that failed."""


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What a key has."""

    value: T | None
    """None where it has none."""
    revision: int
    """Of its last change; 0 where there was none."""


class Bucket(Protocol):
    """One bucket. Keys are ids; values are messages or fact dataclasses as JSON."""

    async def put(self, key: str, value: object, *, sent: Moment | None = None) -> None:
        """Write the last value of a key.

        Writes of one key through one bus are kept in the order of the calls.

        ``sent`` is for the value's envelope: a phase of its watchers begins then.

        Raises:
            BusUnavailable: the server did not confirm. The value may have been written, and no
                later one is overtaken by it.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove a key: what it named is gone for good.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        ...

    async def get(self, key: str, value_type: type[T]) -> Found[T]:
        """Ask for one key, as it is at this moment.

        Raises:
            BusUnavailable: the server does not answer.
            MessageUndecodable: the value is not of this type.
        """
        ...

    async def replace(self, key: str, value: object, revision: int) -> None:
        """Write a key that is still what ``get`` found: at this revision.

        Raises:
            Conflict: it was written since; nothing was changed.
            BusUnavailable: the server did not confirm; the value may have been written.
        """
        ...

    async def watch(
        self, value_type: type[T], on_change: Callable[[str, T | None], Awaitable[None]]
    ) -> None:
        """Deliver every present value, then every change, for ever; None for a removed key.

        A watcher that asks for ``Timed[X]`` hears when each value was sent, too.

        Resumes after a break by itself: present values are then delivered again, so that nothing is
        missed.
        """
        ...


class NatsBucket:
    """``Bucket`` on JetStream key-value."""

    def __init__(
        self,
        client: KeptClient,
        name: str,
        on_reconnect: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._client = client
        self._stream = jetstream(client)
        self._name = name
        self._subject = f"$KV.{name}."
        self._writing: dict[str, _Turn] = {}
        self._queues: set[asyncio.Queue[Msg | None]] = set()
        on_reconnect(self._start_anew)

    async def open(self) -> None:
        """Make the bucket where it does not exist.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        try:
            try:
                await self._stream.stream_info(f"KV_{self._name}")
            except nats.js.errors.NotFoundError:
                await self._stream.create_key_value(KeyValueConfig(bucket=self._name, history=1))
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(f"cannot open the bucket {self._name}: {error!r}") from error

    async def put(self, key: str, value: object, *, sent: Moment | None = None) -> None:
        await self._write(key, encode_json(value), stamped({}, sent) or None)

    async def delete(self, key: str) -> None:
        await self._write(key, b"", {KV_OP: KV_DEL})

    async def get(self, key: str, value_type: type[T]) -> Found[T]:
        try:
            found = await self._stream.get_last_msg(f"KV_{self._name}", self._subject + key)
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _NO_STREAM:
                await self.open()
            return Found(None, 0)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(
                f"cannot read {key} in the bucket {self._name}: {error!r}"
            ) from error
        headers: dict[str, str] = found.headers or {}
        if headers.get(KV_OP) in (KV_DEL, KV_PURGE):
            return Found(None, found.seq)
        return Found(decode_json(found.data, value_type), found.seq)

    async def replace(self, key: str, value: object, revision: int) -> None:
        await self._write(key, encode_json(value), {_EXPECTED: str(revision)})

    async def watch(
        self, value_type: type[T], on_change: Callable[[str, T | None], Awaitable[None]]
    ) -> None:
        backoff, rng, failures = Backoff(first_s=0.05, limit_s=2.0), random.Random(), 0
        while True:
            try:
                async with self._consumer() as queue:
                    failures = 0
                    await self._deliver(queue, value_type, on_change)
            except (nats.errors.Error, BusUnavailable, OSError) as error:
                log.warning(
                    "watch broke; starting anew",
                    action="bucket_watch_restart",
                    bucket=self._name,
                    error=repr(error),
                )
                await pause(backoff.delay_s(failures, rng))
                failures += 1

    async def _write(self, key: str, data: bytes, headers: dict[str, str] | None) -> None:
        if (
            not key
            or any(character in key for character in " \t\r\n*>")
            or key[0] == "."
            or key[-1] == "."
        ):
            raise BadRequest(f"{key!r} cannot be a key of a bucket")
        async with self._turn(key):
            try:
                await self._stream.publish(self._subject + key, data, headers=headers)
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_SEQUENCE:
                    raise Conflict(
                        f"{key} in the bucket {self._name} was written meanwhile"
                    ) from error
                raise write_failure(
                    f"cannot write {key} to the bucket {self._name}", error
                ) from error
            except (nats.errors.Error, TimeoutError, OSError) as error:
                raise write_failure(
                    f"cannot write {key} to the bucket {self._name}", error
                ) from error

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncGenerator[None]:
        turn = self._writing.setdefault(key, _Turn())
        turn.waiting += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.waiting -= 1
            if turn.waiting == 0:
                del self._writing[key]

    async def _start_anew(self) -> None:
        for queue in self._queues:
            _offer(queue, None)

    @asynccontextmanager
    async def _consumer(self) -> AsyncGenerator[asyncio.Queue[Msg | None]]:
        """A queue that gets every last value, then every change; None in it says that something was
        missed.
        """
        queue: asyncio.Queue[Msg | None] = asyncio.Queue(MAX_QUEUED)
        inbox = self._client.new_inbox()

        async def on_message(msg: Msg) -> None:
            _offer(queue, msg)

        def take(msg: Msg) -> bool:
            _offer(queue, msg)
            return True

        client: Any = self._client
        subscription = await client.subscribe(inbox, cb=on_message)
        self._client.at_once(subscription, take)
        self._queues.add(queue)
        try:
            # Not nats-py's own watcher: it takes more than ten seconds to see that a restarted
            # server has forgotten it.
            config = ConsumerConfig(
                deliver_subject=inbox,
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                filter_subject=f"{self._subject}>",
                ack_policy=AckPolicy.NONE,
                max_deliver=1,
                idle_heartbeat=HEARTBEAT_S,
                inactive_threshold=CONSUMER_LINGERS_S,
                mem_storage=True,
                num_replicas=1,
            )
            try:
                await self._stream.add_consumer(f"KV_{self._name}", config, timeout=DEADLINE_S)
            except nats.js.errors.NotFoundError:
                await self.open()
                await self._stream.add_consumer(f"KV_{self._name}", config, timeout=DEADLINE_S)
            yield queue
        finally:
            self._queues.discard(queue)
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def _deliver(
        self, queue: asyncio.Queue[Msg | None], value_type: type[T], on_change: OnChange[T]
    ) -> None:
        """Hand on what comes; return when the watch must start anew."""
        expected = 1
        while True:
            try:
                # A timer for each of hundreds of changes a second costs more than most of them.
                if queue.empty():
                    async with asyncio.timeout(SILENCE_S):
                        msg = await queue.get()
                else:
                    msg = queue.get_nowait()
            except TimeoutError:
                log.warning(
                    "watch is silent; starting anew",
                    action="bucket_watch_silent",
                    bucket=self._name,
                )
                return
            if msg is None:
                return
            headers = msg.headers or {}
            if headers.get("Status") == "100":
                continue
            if msg.metadata.sequence.consumer != expected:
                log.warning(
                    "watch missed a change; starting anew",
                    action="bucket_watch_gap",
                    bucket=self._name,
                )
                return
            expected += 1
            key = msg.subject.removeprefix(self._subject)
            if headers.get(KV_OP) in (KV_DEL, KV_PURGE):
                await on_change(key, None)
                continue
            try:
                value = opened(msg.data, headers, value_type, decode_json)
            except MessageUndecodable as error:
                log.error(
                    "value dropped",
                    action="bucket_undecodable",
                    bucket=self._name,
                    key=key,
                    error=error.message,
                )
                continue
            await on_change(key, value)


class _Turn:
    """Writers of one key wait here for one another."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


def _offer(queue: asyncio.Queue[Msg | None], msg: Msg | None) -> None:
    """Queue a message; where there is no room, everything queued gives way to the word that
    something was missed.
    """
    try:
        queue.put_nowait(msg)
    except asyncio.QueueFull:
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


def write_failure(what: str, error: Exception) -> BusUnavailable:
    """What to raise when the server did not take what was to be stored."""
    if isinstance(error, nats.js.errors.APIError):
        kind = BusFull if error.err_code in _OUT_OF_ROOM else BusUnavailable
        return kind(f"{what}: NATS says {error.description!r} ({error.code}/{error.err_code})")
    if isinstance(error, TimeoutError):
        return BusUnavailable(f"{what}: NATS did not confirm it within {DEADLINE_S:g} s")
    return BusUnavailable(f"{what}: {error!r}")


def jetstream(client: Client) -> Any:
    """A client's JetStream, with this module's deadline. nats-py types it in part only."""
    untyped: Any = client
    return untyped.jetstream(timeout=DEADLINE_S)
