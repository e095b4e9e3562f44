"""Token batches to gateways: at the end of each engine step one message for each gateway.

There is no timer where the system keeps up: tokens leave as soon as they are there, and what
collects while a message is on its way to the bus leaves with the next one. Steps that take less
than ``SHORTEST_S`` share messages, too, up to one in which a request ends. What nobody looks at yet
(``Submit.whole``) waits for ``WHOLE_S``. The rate grows with workers, not with requests. A message
may be lost: what it held is in the request table until it is acknowledged.

Where the bus takes a message at once, no task has a part in it; where it does not, one waits.
"""

import asyncio

import structlog

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.tokens import TokenBatch, TokenEntry, tokens_subject
from pilotlight.common.service import Background
from pilotlight.common.waiting import pause, within
from pilotlight.policy.ids import GatewayId, WorkerId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import RequestKey
from pilotlight.worker.requests import RequestTable, Unsent

log = structlog.get_logger()

SHORTEST_S = 0.001
"""Between two sends: no client has use for pieces that come faster, and each costs its gateway as
much as a piece with many tokens. Steps of models on a GPU take longer."""
WHOLE_S = 0.05
"""How long tokens wait of an answer that its client gets in one piece, for later ones or its end.
Should this worker die, another one makes again what has not left."""
PUBLISH_DEADLINE_S = 2.0
MAX_BATCH_TOKENS = 65_536
"""Of one message; a request that has more goes alone."""


class TokenPublisher:
    """Remembers from which position on each request is to be sent, and sends what the table has
    of it by then: nothing is copied, or put together, before it leaves.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        background: Background,
        worker_id: WorkerId,
        table: RequestTable,
    ) -> None:
        """Sends from now on.

        Args:
            bus: carries the messages.
            clock: for the time between two sends.
            background: owns the task that sends.
            worker_id: stands in every message.
            table: has the tokens.
        """
        self._bus = bus
        self._clock = clock
        self._worker_id = worker_id
        self._table = table
        self._unsent: dict[GatewayId, dict[RequestKey, int]] = {}
        self._waiting: dict[RequestKey, Unsent] = {}
        """What may wait: it is unsent after ``WHOLE_S``, or with others of its request."""
        self._waited: asyncio.TimerHandle | None = None
        """Then."""
        self._sampled: dict[GatewayId, Moment] = {}
        self._wake = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        """Sends what the bus takes at once."""
        self._last_s = -SHORTEST_S
        self._waits = False
        """The task is under way, or about to be: for what the bus did not take at once."""
        background.spawn(f"token batches of {worker_id}", self._send_for_ever())

    def add(self, unsent: Unsent, sampled: Moment | None = None) -> None:
        """Queue tokens, ``sampled`` then; they leave with the next ``flush``, or later if they
        may.
        """
        gateway_id, key, position = unsent.gateway_id, unsent.key, unsent.position
        if unsent.waits:
            if key in self._unsent.get(gateway_id, ()):
                return  # It leaves with what was there before it.
            self._waiting.setdefault(key, unsent)
            if self._waited is None:
                loop = asyncio.get_running_loop()
                self._waited = loop.call_later(WHOLE_S, self._wait_no_more)
            return
        if (earlier := self._waiting.pop(key, None)) is not None:
            position = earlier.position
        if sampled is not None and position == 0:
            # A cold start ends with the first token of a request: the other batches need no header.
            self._sampled.setdefault(gateway_id, sampled)
        waiting = self._unsent.get(gateway_id)
        if waiting is None:
            self._unsent[gateway_id] = {key: position}
        elif key not in waiting:
            waiting[key] = position

    def flush(self, *, ended: bool = False) -> None:
        """Steps are over: send what they produced; at once, if a request has ended."""
        if self._waits:
            self._wake.set()
            return
        if not self._unsent or (self._due is not None and not ended):
            return
        early_s = self._last_s + SHORTEST_S - self._clock.monotonic_s()
        if early_s <= 0 or ended:
            self._send_soon()
        else:
            self._due = asyncio.get_running_loop().call_later(early_s, self._send_soon)

    async def drain(self) -> None:
        """Send everything that waits, now."""
        self._take_waiting()
        while self._unsent:
            gateway_id, waiting = self._unsent.popitem()
            sampled = self._sampled.pop(gateway_id, None)
            for batch in self._batches(waiting):
                await self._send(gateway_id, sampled, batch)

    def _wait_no_more(self) -> None:
        self._take_waiting()
        self.flush()

    def _take_waiting(self) -> None:
        """What waited is to be sent."""
        waited, self._waited = self._waited, None
        if waited is not None:
            waited.cancel()
        for unsent in self._waiting.values():
            self._unsent.setdefault(unsent.gateway_id, {}).setdefault(unsent.key, unsent.position)
        self._waiting.clear()

    def _send_soon(self) -> None:
        """Send what the bus takes at once; the task sends the rest."""
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        self._last_s = self._clock.monotonic_s()
        while self._unsent:
            gateway_id, waiting = self._unsent.popitem()
            sampled = self._sampled.pop(gateway_id, None)
            batches = self._batches(waiting)
            for index, entries in enumerate(batches):
                if not self._sent_soon(gateway_id, sampled, entries):
                    self._put_back(gateway_id, sampled, batches[index:])
                    self._waits = True
                    self._wake.set()
                    return

    def _sent_soon(
        self, gateway_id: GatewayId, sampled: Moment | None, entries: list[TokenEntry]
    ) -> bool:
        batch = TokenBatch(worker_id=self._worker_id, entries=entries)
        try:
            return self._bus.publish_soon(
                tokens_subject(gateway_id), batch, binary=True, sent=sampled
            )
        except PilotlightError as error:
            _tell_lost(gateway_id, error)
            return True

    def _put_back(
        self, gateway_id: GatewayId, sampled: Moment | None, batches: list[list[TokenEntry]]
    ) -> None:
        """These have not left."""
        self._unsent[gateway_id] = {
            RequestKey(entry.request_id, entry.attempt): entry.seq
            for entries in batches
            for entry in entries
        }
        if sampled is not None:
            self._sampled[gateway_id] = sampled

    async def _send_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            early_s = self._last_s + SHORTEST_S - self._clock.monotonic_s()
            if early_s > 0:
                await pause(early_s)
            self._wake.clear()
            self._last_s = self._clock.monotonic_s()
            await self.drain()
            self._waits = self._wake.is_set()

    def _batches(self, waiting: dict[RequestKey, int]) -> list[list[TokenEntry]]:
        """One message's entries, or several's where there are too many tokens for one."""
        batches: list[list[TokenEntry]] = []
        room = 0
        for key, position in waiting.items():
            entry = self._table.entry(key, position)
            if entry is None:
                continue
            room -= len(entry.token_ids)
            if room < 0 or not batches:
                batches.append([])
                room = MAX_BATCH_TOKENS - len(entry.token_ids)
            batches[-1].append(entry)
        return batches

    async def _send(
        self, gateway_id: GatewayId, sampled: Moment | None, entries: list[TokenEntry]
    ) -> None:
        batch = TokenBatch(worker_id=self._worker_id, entries=entries)
        try:
            publishing = self._bus.publish(
                tokens_subject(gateway_id), batch, binary=True, sent=sampled
            )
            await within(PUBLISH_DEADLINE_S, publishing, "sending a token batch")
        except PilotlightError as error:
            _tell_lost(gateway_id, error)


def _tell_lost(gateway_id: GatewayId, error: PilotlightError) -> None:
    log.warning(
        "token batch lost", action="tokens_lost", gateway_id=gateway_id, error=error.message
    )
