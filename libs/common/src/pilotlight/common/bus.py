"""The bus as services see it: request/reply with deadlines, notifications, events and last-value buckets.

Everything that crosses it carries W3C trace context in its headers, a request the time that its sender still waits, and
a message that begins a phase the moment at which it was sent (``envelope``). Subjects carry the major version (``v1.…``).
``nats_bus.NatsBus`` is the real one; tests wrap it in ``faulty_bus.FaultyBus``, which loses, delays and repeats messages.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, runtime_checkable

from pilotlight.common.buckets import Bucket
from pilotlight.policy.phase import Moment

T = TypeVar("T")
Req = TypeVar("Req")
Handler = Callable[[Req], Awaitable[object]]
Listener = Callable[[Req], Awaitable[None]]


class Subscription(Protocol):
    """Something that delivers until it is ended."""

    async def end(self) -> None:
        """Deliver no more, and return when what is being handled has ended (at once when called from within it)."""
        ...


@runtime_checkable
class Bus(Protocol):
    """What services see of NATS."""

    @property
    def connected(self) -> bool:
        """False while the server cannot be reached, or does not answer: nobody's silence says anything then."""
        ...

    @property
    def unwritable(self) -> str | None:
        """Why the server, which answers, does not store what is written to it; None while it does, or nobody has looked."""
        ...

    async def publish(self, subject: str, message: object, *, binary: bool = False, sent: Moment | None = None) -> None:
        """Send a notification. It may be lost; whoever needs it reconciles.

        ``sent`` is for its envelope: a phase of its receiver begins then.

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
        """Answer requests, several at a time; what ``handler`` raises reaches the requester as the same error.

        Servers that name the same ``queue`` share the requests. A handler is cancelled at the requester's deadline.
        """
        ...

    async def subscribe(
        self, subject: str, message_type: type[Req], listener: Listener[Req], *, queue: str = "", binary: bool = False
    ) -> Subscription:
        """Listen to notifications, one after the other, in order.

        A listener that asks for ``Timed[X]`` hears when each was sent, too.
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


def subject_family(subject: str) -> str:
    """The subject with its version and ids left out: there are few of them, so they name spans and edges."""
    return ".".join("*" if any(c.isdigit() for c in token[1:]) else token for token in subject.split(".")[1:])
