"""One subscription of ``NatsBus``, and its orderly end: what is being handled comes to its end
first.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from pilotlight.common.bus import AtOnceListener, Listener
from pilotlight.common.envelope import opened
from pilotlight.common.errors import MessageUndecodable, PilotlightError
from pilotlight.common.waiting import cancel_all

log = structlog.get_logger()

END_DEADLINE_S = 5.0
"""How long the end of a subscription waits for what is being handled."""

Req = TypeVar("Req")


class BusSubscription:
    """A subscription, and what is being handled of it."""

    def __init__(self, registry: "set[BusSubscription]") -> None:
        self.subscription: NatsSubscription | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._registry = registry
        self._idle = asyncio.Event()
        self._idle.set()
        self._listener: asyncio.Task[Any] | None = None
        self._ended = False
        registry.add(self)

    @property
    def ended(self) -> bool:
        """Nothing is to be taken any more."""
        return self._ended

    def __enter__(self) -> bool:
        """Around a listener's call; False once the subscription has ended."""
        self._listener = asyncio.current_task()
        self._idle.clear()
        return not self._ended

    def __exit__(self, *_: object) -> None:
        self._idle.set()

    async def end(self) -> None:
        """Take no more; returns when what is being handled has ended, or is cut off after
        ``END_DEADLINE_S``.
        """
        self._ended = True
        self._registry.discard(self)
        if asyncio.current_task() in (self._listener, *self.tasks):
            # A task of its own that ends it is not waited for: it would wait for itself.
            task = asyncio.create_task(self._unsubscribe(), name="end of a subscription")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            return
        await self._unsubscribe()
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=END_DEADLINE_S)
            await cancel_all(late)

    async def _unsubscribe(self) -> None:
        subscription, self.subscription = self.subscription, None
        if subscription is None:
            return
        try:
            # nats-py cancels a listener in the middle of its work when it is unsubscribed, so it is
            # let come to its end first.
            async with asyncio.timeout(END_DEADLINE_S):
                await self._idle.wait()
        except TimeoutError:
            log.warning(
                "a listener is cut off", action="bus_listener_cut_off", subject=subscription.subject
            )
        try:
            await subscription.unsubscribe()
        except nats.errors.Error:
            log.debug("subscription was already closed", action="bus_unsubscribe")


async def hear(listener: Listener[Req], message: Req, subject: str) -> None:
    """Give a message to its listener; what that raises is logged, and the subscription goes on."""
    try:
        await listener(message)
    except Exception as error:  # noqa: BLE001 - a listener's bug must not end the subscription
        _tell(error, subject)


def hear_at_once(listener: AtOnceListener[Req], message: Req, subject: str) -> None:
    """As ``hear``, for a listener that never waits."""
    try:
        listener(message)
    except Exception as error:  # noqa: BLE001 - likewise
        _tell(error, subject)


def told_by(
    msg: Msg, message_type: type[Req], decode: Callable[[bytes, Any], Any]
) -> tuple[Req, ...]:
    """What a notification says; nothing of one that cannot be read."""
    try:
        return (opened(msg.data, msg.headers, message_type, decode),)
    except MessageUndecodable as error:
        log.error(
            "message dropped",
            action="bus_undecodable",
            subject=msg.subject,
            error=error.message,
        )
        return ()


def _tell(error: Exception, subject: str) -> None:
    """Log what a listener raised."""
    if isinstance(error, PilotlightError):
        log.warning(
            "listener refused", action="bus_listener_refused", subject=subject, error=error.message
        )
    else:
        log.error("listener failed", action="bus_listener_failed", subject=subject, exc_info=error)
