"""The bus as services see it: request/reply with deadlines, notifications, events and last-value
buckets.

Everything that crosses it carries W3C trace context in its headers, a request the time that its
sender still waits, and a message that begins a phase the moment at which it was sent
(``envelope``). Subjects carry the major version (``v1.…``). ``nats_bus.NatsBus`` is the real one;
tests wrap it in ``faulty_bus.FaultyBus``, which loses, delays and repeats messages.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, runtime_checkable

from pilotlight.common.buckets import Bucket
from pilotlight.policy.phase import Moment

T = TypeVar("T")
Req = TypeVar("Req")
Handler = Callable[[Req], Awaitable[object]]
Listener = Callable[[Req], Awaitable[None]]
AtOnceHandler = Callable[[Req], object | None]
"""Makes the reply without waiting for anything; None: a ``Handler`` is to be asked."""
AtOnceListener = Callable[[Req], None]
"""Never waits."""


class Subscription(Protocol):
    """Something that delivers until it is ended."""

    async def end(self) -> None:
        """Deliver no more, and return when what is being handled has ended (at once when called
        from within it).
        """
        ...


@runtime_checkable
class Bus(Protocol):
    """What services see of NATS."""

    @property
    def connected(self) -> bool:
        """False while the server cannot be reached, or does not answer: silence of other services
        says nothing then.
        """
        ...

    @property
    def unwritable(self) -> str | None:
        """Why the server, which answers, does not store what is written to it; None while it does,
        or before the first look.
        """
        ...

    async def publish(
        self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None
    ) -> None:
        """Send a notification. It may be lost; services that need it reconcile.

        Args:
            subject: where to, without the installation's prefix.
            message: a type of ``common.messages``.
            binary: encode as MessagePack in place of JSON, for messages with many numbers.
            sent: for its envelope: a phase of its receiver begins then.

        Raises:
            MessageTooLarge: it is beyond the bus's limit.
        """
        ...

    async def request(
        self, subject: str, message: object, reply_type: type[T], *, deadline_s: float
    ) -> T:
        """Send a request and wait for its reply.

        Args:
            subject: where to, without the installation's prefix.
            message: a type of ``common.messages``.
            reply_type: what the reply is decoded as.
            deadline_s: how long to wait, in seconds; the server hears of it, too.

        Raises:
            DeadlineExceeded: no reply in time. The request may have been carried out.
            BusUnavailable: no service listens on the subject, or the server cannot be reached.
            MessageTooLarge: the request is beyond the bus's limit.
            PilotlightError: what the server of the subject raised.
        """
        ...

    def publish_soon(
        self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None
    ) -> bool:
        """As ``publish``, from where nothing can be waited for; False: it was not sent, because
        that would have to wait, or there is no connection.
        """
        ...

    def write_now(self) -> None:
        """Have what was published in this turn of the loop written before anything else runs, and
        not with what others publish: somebody waits for nothing but that.
        """
        ...

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
        """Answer requests, several at a time; what ``handler`` raises reaches the requester as the
        same error.

        A handler is cancelled at the requester's deadline.

        Args:
            subject: what to answer, without the installation's prefix.
            request_type: what requests are decoded as.
            handler: makes the reply.
            queue: servers that name the same one share the requests; empty: each server gets all.
            at_once: is asked before ``handler``, and takes no task where it makes the reply. What
                it raises is not told: ``handler`` is asked then, too.
            pressing: answers are written before anything else runs, as by ``write_now``.
        """
        ...

    async def hear(
        self,
        subject: str,
        message_type: type[Req],
        listener: AtOnceListener[Req],
        *,
        binary: bool = False,
    ) -> Subscription:
        """As ``subscribe``, for a listener that never waits: it is called as messages come, without
        a queue between.
        """
        ...

    async def subscribe(
        self,
        subject: str,
        message_type: type[Req],
        listener: Listener[Req],
        *,
        queue: str = "",
        binary: bool = False,
    ) -> Subscription:
        """Listen to notifications, one after the other, in order.

        A listener that asks for ``Timed[X]`` hears when each was sent, too.

        Args:
            subject: what to hear, without the installation's prefix; ``*`` and ``>`` as of NATS.
            message_type: what notifications are decoded as.
            listener: is called with each of them.
            queue: listeners that name the same one share the notifications; empty: each gets all.
            binary: they are encoded as MessagePack.
        """
        ...

    async def publish_event(self, subject: str, event_id: str, message: object) -> None:
        """Store an event in the stream; a repeated ``event_id`` is stored once.

        Raises:
            BusUnavailable: the stream did not confirm.
        """
        ...

    async def bucket(self, name: str) -> Bucket:
        """A last-value bucket; made when it does not exist.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call after each reconnect: ask for what was missed, publish what is held."""
        ...

    async def close(self) -> None:
        """Send what is buffered and leave."""
        ...


@functools.lru_cache(4096)
def subject_family(subject: str) -> str:
    """The subject with its version and ids left out: there are few of them, so they name spans and
    edges.
    """
    return ".".join(
        "*" if any(c.isdigit() for c in token[1:]) else token for token in subject.split(".")[1:]
    )
