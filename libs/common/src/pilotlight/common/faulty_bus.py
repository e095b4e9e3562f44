"""``FaultyBus``: a real bus on which messages are lost, late, repeated and overtaken, as a seed
says.

For tests.

It stands between a service and its ``NatsBus``; the messages still go through a real server. What
may happen is what the real thing may do to a service, and no more:

================  ============================================================================================================
notification      *lost* for one subscriber (it reconnected, or its queue was full); *late*, with all that come after it (a link
                  stalls); *overtaken* by those that come after it (its sender reconnected to
                  another server of a cluster); *twice*, the second time late (its sender repeats
                  itself, as every level-triggered sender does)
request           *lost*, or its *reply lost* after it was carried out: either way ``DeadlineExceeded`` at the deadline; *late* on
                  the way there or back; carried out *twice* (a client without an answer asks again)
bucket, write     not confirmed, written or not: ``BusUnavailable``; confirmed late. Writes of a key keep their order
bucket, watch     late, in order; *anew*: every last value again, as after a break. Nothing is lost, altered or overtaken
event             not confirmed, stored or not: ``BusUnavailable``
connection        ``breaking_off``: for a while nothing is heard or sent, ``connected`` is False, requests fail; notifications that
                  are sent meanwhile leave when it is over; then every listener is told of the
                  reconnect, and watches start anew
================  ============================================================================================================

Each edge (endpoint, kind, subject without ids) has a generator of its own, made from the seed and
the edge's name, and takes two numbers from it for each message: what becomes of the n-th message of
an edge depends on the seed and on n alone. Run again, a schedule is the same as far as asyncio and
the server deliver in the same order.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from pilotlight.common.buckets import Bucket, Found
from pilotlight.common.bus import (
    AtOnceHandler,
    AtOnceListener,
    Bus,
    Handler,
    Listener,
    Subscription,
    subject_family,
)
from pilotlight.common.errors import BusUnavailable, DeadlineExceeded, PilotlightError
from pilotlight.common.fault_schedule import Drawn, Fault, FaultSchedule
from pilotlight.common.waiting import cancel_all, pause, within
from pilotlight.policy.phase import Moment

log = structlog.get_logger()

T = TypeVar("T")
Req = TypeVar("Req")


class _Unsent(NamedTuple):
    """A notification that waits for the connection."""

    subject: str
    message: object
    binary: bool
    sent: Moment | None


class FaultyBus:
    """``Bus`` of one endpoint."""

    def __init__(self, bus: Bus, endpoint: str, schedule: FaultSchedule) -> None:
        self._bus = bus
        self._endpoint = endpoint
        self._schedule = schedule
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._up = asyncio.Event()
        self._up.set()
        self._breaks = 0
        self._unsent: list[_Unsent] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._up.is_set() and self._bus.connected

    @property
    def unwritable(self) -> str | None:
        return self._bus.unwritable

    @property
    def breaks(self) -> int:
        """How often the connection was broken off."""
        return self._breaks

    def draw(self, kind: str, subject: str) -> Drawn:
        """What becomes of the next message of an edge of this endpoint."""
        return self._schedule.draw(f"{self._endpoint} {kind} {subject_family(subject)}")

    async def until_up(self) -> None:
        """Return when the connection is there."""
        await self._up.wait()

    @asynccontextmanager
    async def breaking_off(self) -> AsyncGenerator[None]:
        """The connection is lost within this, and comes back after it."""
        self._up.clear()
        self._breaks += 1
        try:
            yield
        finally:
            self._up.set()
            unsent, self._unsent = self._unsent, []
            for one in unsent:
                await self._bus.publish(one.subject, one.message, binary=one.binary, sent=one.sent)
            for callback in self._callbacks:
                self._spawn("after reconnect", callback())

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._callbacks.append(callback)
        self._bus.on_reconnect(callback)

    async def publish(
        self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None
    ) -> None:
        """As ``Bus.publish``.

        Faults of notifications are dealt out where they are delivered, for each subscriber its own.
        """
        if self._up.is_set():
            await self._bus.publish(subject, message, binary=binary, sent=sent)
        else:
            self._unsent.append(_Unsent(subject, message, binary, sent))

    def publish_soon(
        self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None
    ) -> bool:
        return self._up.is_set() and self._bus.publish_soon(
            subject, message, binary=binary, sent=sent
        )

    def write_now(self) -> None:
        if self._up.is_set():
            self._bus.write_now()

    async def request(
        self, subject: str, message: object, reply_type: type[T], *, deadline_s: float
    ) -> T:
        drawn = self.draw("request", subject)
        asking = self._ask(subject, message, reply_type, deadline_s, drawn)
        try:
            return await within(deadline_s, asking, f"an answer on {subject}")
        except DeadlineExceeded:
            if not self._up.is_set():
                raise BusUnavailable(
                    f"the connection is broken off: nobody was asked on {subject}"
                ) from None
            raise

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
        async def answer(request: Req) -> object:
            if not self._up.is_set():
                raise BusUnavailable(f"{self._endpoint} is broken off")
            return await handler(request)

        def answer_at_once(request: Req) -> object | None:
            return at_once(request) if at_once is not None and self._up.is_set() else None

        told: Any = {"queue": queue, "at_once": answer_at_once, "pressing": pressing}
        return await self._bus.serve(subject, request_type, answer, **told)

    async def subscribe(
        self,
        subject: str,
        message_type: type[Req],
        listener: Listener[Req],
        *,
        queue: str = "",
        binary: bool = False,
    ) -> Subscription:
        deliveries = _Deliveries(self, subject, listener)
        deliveries.inner = await self._bus.subscribe(
            subject, message_type, deliveries.take, queue=queue, binary=binary
        )
        return deliveries

    async def hear(
        self,
        subject: str,
        message_type: type[Req],
        listener: AtOnceListener[Req],
        *,
        binary: bool = False,
    ) -> Subscription:
        async def listen(message: Req) -> None:
            listener(message)

        return await self.subscribe(subject, message_type, listen, binary=binary)

    async def publish_event(self, subject: str, event_id: str, message: object) -> None:
        await self.confirmed(
            "event", subject, lambda: self._bus.publish_event(subject, event_id, message)
        )

    async def bucket(self, name: str) -> Bucket:
        return _FaultyBucket(self, await self._bus.bucket(name), f"bucket.{name}")

    async def close(self) -> None:
        await cancel_all(self._tasks)
        await self._bus.close()

    async def confirmed(
        self, kind: str, subject: str, write: Callable[[], Awaitable[None]]
    ) -> None:
        """Write something that the server confirms.

        Raises:
            BusUnavailable: no confirmation came.
        """
        drawn = self.draw(kind, subject)
        if not self._up.is_set():
            raise BusUnavailable("the connection is broken off")
        if drawn.fault is not Fault.LOST or drawn.on_the_way_back:
            await write()
        if drawn.fault is not None:
            await pause(drawn.late_s)
        if drawn.fault is Fault.LOST:
            raise BusUnavailable(f"the server did not confirm {subject}")

    async def _ask(
        self, subject: str, message: object, reply_type: type[T], deadline_s: float, drawn: Drawn
    ) -> T:
        await self._up.wait()
        if not drawn.on_the_way_back:
            await self._travel(drawn, deadline_s)
        if drawn.fault is Fault.TWICE:
            self._spawn(
                "ask twice", self._ask_again(subject, message, reply_type, deadline_s, drawn.late_s)
            )
        # Its own deadline ends it, not a cancellation: so the service is given the time that is
        # left.
        try:
            reply = await self._bus.request(subject, message, reply_type, deadline_s=deadline_s)
        except (BusUnavailable, DeadlineExceeded):
            raise
        except PilotlightError:
            if drawn.on_the_way_back:
                await self._travel(drawn, deadline_s)
            raise
        if drawn.on_the_way_back:
            await self._travel(drawn, deadline_s)
        return reply

    async def _travel(self, drawn: Drawn, deadline_s: float) -> None:
        """What is lost takes longer than any caller waits for it."""
        if drawn.fault is Fault.LOST:
            await pause(deadline_s)
        elif drawn.fault in (Fault.LATE, Fault.OVERTAKEN):
            await pause(drawn.late_s)

    async def _ask_again(
        self, subject: str, message: object, reply_type: type[Any], deadline_s: float, late_s: float
    ) -> None:
        await pause(late_s)
        try:
            await self._bus.request(subject, message, reply_type, deadline_s=deadline_s)
        except PilotlightError as error:
            log.debug("asked twice", action="faulty_bus_twice", subject=subject, code=error.code)

    def _spawn(self, name: str, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Deliveries(Generic[Req]):
    """The way of one subscription's notifications to its listener: one at a time, in order but for
    what is overtaken.
    """

    def __init__(self, bus: FaultyBus, subject: str, listener: Listener[Req]) -> None:
        self.inner: Subscription | None = None
        self._bus = bus
        self._subject = subject
        self._listener = listener
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, message: Req) -> None:
        """Listener of the real subscription."""
        drawn = self._bus.draw("deliver", self._subject)
        if not self._bus.connected or drawn.fault is Fault.LOST:
            return
        if drawn.fault is Fault.OVERTAKEN:
            self._later(message, drawn.late_s)
            return
        if drawn.fault is Fault.LATE:
            await pause(drawn.late_s)
        if drawn.fault is Fault.TWICE:
            self._later(message, drawn.late_s)
        await self._hand(message)

    async def end(self) -> None:
        if self.inner is not None:
            await self.inner.end()
        await cancel_all(self._tasks - {asyncio.current_task()})

    def _later(self, message: Req, late_s: float) -> None:
        task = asyncio.create_task(
            self._deliver_late(message, late_s), name=f"late on {self._subject}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver_late(self, message: Req, late_s: float) -> None:
        await pause(late_s)
        try:
            await self._hand(message)
        except PilotlightError as error:
            log.debug(
                "listener refused",
                action="faulty_bus_refused",
                subject=self._subject,
                error=error.message,
            )
        except Exception:  # as on the real bus: a listener's bug ends nothing
            log.exception(
                "listener failed", action="faulty_bus_listener_failed", subject=self._subject
            )

    async def _hand(self, message: Req) -> None:
        async with self._turn:
            await self._listener(message)


class _FaultyBucket:
    def __init__(self, bus: FaultyBus, bucket: Bucket, name: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._name = name

    async def put(self, key: str, value: object, *, sent: Moment | None = None) -> None:
        await self._bus.confirmed(
            "put", self._name, lambda: self._bucket.put(key, value, sent=sent)
        )

    async def delete(self, key: str) -> None:
        await self._bus.confirmed("put", self._name, lambda: self._bucket.delete(key))

    async def get(self, key: str, value_type: type[T]) -> Found[T]:
        found: list[Found[T]] = []

        async def ask() -> None:
            found.append(await self._bucket.get(key, value_type))

        await self._bus.confirmed("get", self._name, ask)
        return found[0]

    async def replace(self, key: str, value: object, revision: int) -> None:
        await self._bus.confirmed(
            "put", self._name, lambda: self._bucket.replace(key, value, revision)
        )

    async def watch(
        self, value_type: type[T], on_change: Callable[[str, T | None], Awaitable[None]]
    ) -> None:
        last: dict[str, T | None] = {}
        breaks = self._bus.breaks

        async def changed(key: str, value: T | None) -> None:
            nonlocal breaks
            # A later change of a key takes the key's place at the end, as on the server.
            last.pop(key, None)
            last[key] = value
            drawn = self._bus.draw("watch", self._name)
            if drawn.fault in (Fault.LATE, Fault.OVERTAKEN):
                await pause(drawn.late_s)
            await self._bus.until_up()
            if drawn.fault in (Fault.LOST, Fault.TWICE) or breaks != self._bus.breaks:
                breaks = self._bus.breaks
                for known, latest in list(last.items()):
                    await on_change(known, latest)
            else:
                await on_change(key, value)

        await self._bucket.watch(value_type, changed)
