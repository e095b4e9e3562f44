"""Token batches to gateways: one message for each engine step and gateway, at most every 5 ms.

The rate grows with workers, not with requests. A batch may be lost: what it held is in the request
table until it is acknowledged.
"""

import asyncio

import structlog

from pilotlight.common.bus import Bus
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.tokens import TokenBatch, TokenEntry, tokens_subject
from pilotlight.common.service import Background
from pilotlight.common.waiting import pause, within
from pilotlight.policy.ids import GatewayId, WorkerId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import RequestKey
from pilotlight.worker.requests import Outgoing

log = structlog.get_logger()

INTERVAL_S = 0.005
PUBLISH_DEADLINE_S = 2.0
MAX_PENDING_TOKENS = 65_536
"""Of one gateway; past it the batch is dropped, and its gateway asks for it again."""


class TokenPublisher:
    """Gathers what a step produced and sends it on. The first tokens after a silence leave at
    once.
    """

    def __init__(self, bus: Bus, background: Background, worker_id: WorkerId) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._pending: dict[GatewayId, dict[RequestKey, TokenEntry]] = {}
        self._tokens: dict[GatewayId, int] = {}
        self._sampled: dict[GatewayId, Moment] = {}
        self._wake = asyncio.Event()
        background.spawn(f"token batches of {worker_id}", self._send_for_ever())

    def add(self, outgoing: Outgoing, sampled: Moment | None = None) -> None:
        """Queue tokens, ``sampled`` then; they leave with the next ``flush``."""
        gateway_id, entry = outgoing
        if sampled is not None and entry.seq == 0:
            # A cold start ends with the first token of a request: the other batches need no header.
            self._sampled.setdefault(gateway_id, sampled)
        waiting = self._pending.setdefault(gateway_id, {})
        key = RequestKey(entry.request_id, entry.attempt)
        before = waiting.get(key)
        waiting[key] = entry if before is None else _joined(before, entry)
        self._tokens[gateway_id] = self._tokens.get(gateway_id, 0) + len(entry.token_ids)
        if self._tokens[gateway_id] > MAX_PENDING_TOKENS:
            log.warning(
                "token batch dropped: it waited too long",
                action="tokens_dropped",
                gateway_id=gateway_id,
            )
            self._take(gateway_id)

    def flush(self) -> None:
        """A step is over: send what it produced."""
        if self._pending:
            self._wake.set()

    async def drain(self) -> None:
        """Send everything that waits, now."""
        for gateway_id in list(self._pending):
            await self._send(gateway_id, self._sampled.get(gateway_id), self._take(gateway_id))

    async def _send_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.drain()
            await pause(INTERVAL_S)

    def _take(self, gateway_id: GatewayId) -> list[TokenEntry]:
        self._tokens.pop(gateway_id, None)
        self._sampled.pop(gateway_id, None)
        return list(self._pending.pop(gateway_id, {}).values())

    async def _send(
        self, gateway_id: GatewayId, sampled: Moment | None, entries: list[TokenEntry]
    ) -> None:
        if not entries:
            return
        batch = TokenBatch(worker_id=self._worker_id, entries=entries)
        try:
            publishing = self._bus.publish(
                tokens_subject(gateway_id), batch, binary=True, sent=sampled
            )
            await within(PUBLISH_DEADLINE_S, publishing, "sending a token batch")
        except PilotlightError as error:
            log.warning(
                "token batch lost", action="tokens_lost", gateway_id=gateway_id, error=error.message
            )


def _joined(before: TokenEntry, after: TokenEntry) -> TokenEntry:
    """Two entries of one request, the second of which goes on where the first ends."""
    both_known = before.logprobs is not None and after.logprobs is not None
    both_top = before.top_logprobs is not None and after.top_logprobs is not None
    return TokenEntry(
        request_id=after.request_id,
        attempt=after.attempt,
        seq=before.seq,
        token_ids=before.token_ids + after.token_ids,
        logprobs=[*(before.logprobs or []), *(after.logprobs or [])] if both_known else None,
        finish=after.finish,
        code=after.code,
        message=after.message,
        top_logprobs=[*(before.top_logprobs or []), *(after.top_logprobs or [])]
        if both_top
        else None,
    )
