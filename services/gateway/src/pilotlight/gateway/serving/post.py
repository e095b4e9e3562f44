"""What a gateway has to tell workers about requests: acknowledgements and cancels, gathered."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from pilotlight.common.bus import Bus
from pilotlight.common.messages.tokens import Ack, AckEntry, Cancel, ack_subject, cancel_subject
from pilotlight.common.waiting import Wake
from pilotlight.policy.ids import GatewayId, RequestId, WorkerId

MAX_ENTRIES = 1024
"""Entries of one acknowledgement."""
DONE_WITHIN_S = 0.02
"""How long the last acknowledgement of a request that has ended waits for others. Its worker has
nothing more to do for it, and a message costs a gateway, the bus and a worker as much as many
entries."""


@dataclass(slots=True)
class _ForWorker:
    acks: list[AckEntry] = field(default_factory=list[AckEntry])
    cancels: list[RequestId] = field(default_factory=list[RequestId])


class Post:
    """What is to be sent, by worker; ``wake`` is set when it is time to ``send``."""

    def __init__(self, bus: Bus, gateway_id: GatewayId, wake: Wake) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._wake = wake
        self._waiting: defaultdict[WorkerId, _ForWorker] = defaultdict(_ForWorker)
        self._due: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Workers that have to be told something."""
        return len(self._waiting)

    def acknowledge(self, worker_id: WorkerId, *entries: AckEntry) -> None:
        """Tell a worker what has arrived."""
        self._waiting[worker_id].acks += entries

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Tell a worker that no client waits for a request."""
        self._waiting[worker_id].cancels.append(request_id)

    def now(self) -> None:
        """It is time: a worker still runs what nobody waits for."""
        self._wake.set()

    def soon(self) -> None:
        """It is time in ``DONE_WITHIN_S`` at the latest."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(DONE_WITHIN_S, self._wake.set)

    async def send(self) -> None:
        """Send everything."""
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        while self._waiting:
            worker_id, post = self._waiting.popitem()
            if post.cancels:
                message = Cancel(
                    gateway_id=self._gateway_id, request_ids=list(dict.fromkeys(post.cancels))
                )
                await self._bus.publish(cancel_subject(worker_id), message)
            for start in range(0, len(post.acks), MAX_ENTRIES):
                entries = post.acks[start : start + MAX_ENTRIES]
                await self._bus.publish(
                    ack_subject(worker_id), Ack(gateway_id=self._gateway_id, entries=entries)
                )
