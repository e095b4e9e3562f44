"""Answers to the requests of one served subject, and what headers say on requests and replies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import nats.errors
import structlog
from nats.aio.msg import Msg

from pilotlight.common.bus import AtOnceHandler, Handler, subject_family
from pilotlight.common.errors import InternalError, PilotlightError, QueueFull
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.nats_client import KeptClient
from pilotlight.common.nats_subscription import BusSubscription
from pilotlight.common.telemetry import server_span
from pilotlight.common.waiting import Begun

log = structlog.get_logger()

DEADLINE_HEADER = "Pilotlight-Deadline-Ms"
"""Time that the sender still waits: relative, because hosts share no clock."""
ERROR_HEADER = "Pilotlight-Error"
"""On a reply: the error's code. The body is then its message."""
RETRY_HEADER = "Pilotlight-Retry-After-S"
MAX_CONCURRENT_REQUESTS = 512
"""Requests that one served subject works on at a time; more are refused with ``queue_full``."""
DEFAULT_DEADLINE_S = 30.0
"""For a request that names no deadline of its own."""
MAX_ERROR_BYTES = 64 * 1024

Req = TypeVar("Req")


class Answers(Generic[Req]):
    """Has each request of a subject answered in a task of its own."""

    def __init__(
        self,
        client: KeptClient,
        fitting: Callable[[bytes], bytes],
        subject: str,
        request_type: type[Req],
        handler: Handler[Req],
        at_once: AtOnceHandler[Req] | None = None,
        *,
        pressing: bool = False,
    ) -> None:
        """Nothing is answered before ``to``.

        Args:
            client: The connection.
            fitting: Returns what fits into a message, and raises for what does not.
            subject: Served here; named in errors and logs.
            request_type: What its messages are decoded as.
            handler: Gives the answer, or raises an error that is the answer.
            at_once: Gives some answers without a task.
            pressing: Answers are written before anything else runs.
        """
        self._client = client
        self._fitting = fitting
        self._subject = subject
        self._request_type = request_type
        self._handler = handler
        self._at_once = at_once
        self._pressing = pressing
        self._span_name = f"serve {subject_family(subject)}"

    def at_once(self, subscribed: BusSubscription) -> Callable[[Msg], bool]:
        """What takes the requests of a subscription as they are read, while not too many are under
        way; their tasks are the subscription's.
        """
        tasks, name = subscribed.tasks, f"serve {self._subject}"

        def take(msg: Msg) -> bool:
            if len(tasks) >= MAX_CONCURRENT_REQUESTS:
                return False
            if self._answered_at_once(msg):
                return True
            task = asyncio.create_task(self._answer(msg), name=name)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return True

        return take

    def to(self, subscribed: BusSubscription) -> Callable[[Msg], Awaitable[None]]:
        """What takes the requests of a subscription that come when it is new, or are too many."""
        take = self.at_once(subscribed)

        async def on_message(msg: Msg) -> None:
            if not take(msg):
                under_way = len(subscribed.tasks)
                await self._reply_error(
                    msg, QueueFull(f"{self._subject} has {under_way} requests under way")
                )

        return on_message

    def _answered_at_once(self, msg: Msg) -> bool:
        """Answer without a task; False: what answers others is to be asked."""
        if self._at_once is None:
            return False
        try:
            with server_span(self._span_name, msg.headers):
                reply = self._at_once(decode_json(msg.data, self._request_type))
                data = None if reply is None else self._fitting(encode_json(reply))
        except Exception as error:  # noqa: BLE001 - the handler finds it, too, and tells it
            log.debug(
                "not answered at once", action="bus_not_at_once", subject=self._subject, error=error
            )
            return False
        return data is not None and self._client.publish_soon(msg.reply, data)

    async def _answer(self, msg: Msg) -> None:
        subject = self._subject
        deadline_s = _deadline_s(msg)
        deadline: asyncio.Timeout | None = None
        try:
            with server_span(self._span_name, msg.headers):
                request = decode_json(msg.data, self._request_type)
                begun = Begun(self._handler(request))
                if begun.ended:
                    reply = begun.result()
                else:
                    async with (deadline := asyncio.timeout(deadline_s)):
                        reply = await begun
                data = self._fitting(encode_json(reply))
            await self._client.publish(msg.reply, data)
            if self._pressing:
                self._client.write_now()
        except PilotlightError as error:
            await self._reply_error(msg, error)
        except nats.errors.Error as error:
            log.warning("reply lost", action="bus_reply_failed", subject=subject, error=str(error))
        except Exception as error:  # the requester must hear of a bug at once, not by its deadline
            if isinstance(error, TimeoutError) and deadline is not None and deadline.expired():
                # The requester has given up at the same moment: no answer is awaited.
                log.warning(
                    "request outlived its deadline",
                    action="bus_deadline",
                    subject=subject,
                    deadline_s=deadline_s,
                )
                return
            log.exception("handler failed", action="bus_handler_failed", subject=subject)
            await self._reply_error(
                msg, InternalError(f"the handler of {subject} failed; see its log")
            )

    async def _reply_error(self, msg: Msg, error: PilotlightError) -> None:
        if not msg.reply:
            return
        headers = {ERROR_HEADER: error.code}
        if error.retry_after_s is not None:
            headers[RETRY_HEADER] = f"{error.retry_after_s:g}"
        try:
            await self._client.publish(
                msg.reply, error.message.encode()[:MAX_ERROR_BYTES], headers=headers
            )
        except nats.errors.Error as failure:
            log.warning("reply lost", action="bus_reply_failed", error=str(failure))


def _deadline_s(msg: Msg) -> float:
    value: Any = (msg.headers or {}).get(DEADLINE_HEADER)
    try:
        return max(0.001, int(value) / 1000)
    except (TypeError, ValueError):
        return DEFAULT_DEADLINE_S
