"""Continuous batching on one instance: who waits, who runs, what the next forward pass holds."""

from dataclasses import dataclass

from pilotlight.engine.core.batch import Batch, Plan, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from pilotlight.engine.core.request import Request, RequestKey
from pilotlight.engine.errors import EngineFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one forward pass."""

    prefill_tokens: int = 512
    """Prompt tokens a step, so that a long prompt does not hold up the requests that already stream."""
    running: int = 256
    """Requests at once."""


class BatchScheduler:
    """First come, first served, and room before work.

    A request is taken up only when the blocks for all the tokens it can reach are free, so whatever runs can run to its end:
    nothing is preempted, and the head of the queue waits only for requests that end.
    """

    def __init__(self, pool: BlockPool, limits: BatchLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: dict[RequestKey, Request] = {}
        """In the order in which they came."""
        self._running: dict[RequestKey, Request] = {}
        """In the order in which they were taken up."""

    @property
    def waiting(self) -> int:
        """Requests that have no room yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that own blocks."""
        return len(self._running)

    @property
    def kv_free_tokens(self) -> int:
        """Room for tokens that no request owns."""
        return self._pool.free_blocks * BLOCK_TOKENS

    @property
    def has_work(self) -> bool:
        """Some request wants tokens."""
        return bool(self._waiting or self._running)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All that have not ended."""
        return (*self._running.values(), *self._waiting.values())

    def find(self, key: RequestKey) -> Request | None:
        """The request, if it has not ended."""
        return self._running.get(key) or self._waiting.get(key)

    def submit(self, request: Request) -> None:
        """Queues a request that passed admission."""
        self._waiting[request.key] = request

    def admit(self, now_s: float) -> None:
        """Takes up waiting requests in order, as long as the first of them fits."""
        while self._waiting and len(self._running) < self._limits.running:
            request = next(iter(self._waiting.values()))
            blocks = self._pool.take(request.key, blocks_for(request.kv_tokens))
            if blocks is None:
                return
            del self._waiting[request.key]
            request.blocks = blocks
            request.taken_s = now_s
            self._running[request.key] = request

    def plan(self) -> Plan:
        """The next forward pass.

        1. Every request with one token to run gets it: those are the streams, and no prompt may starve them.
        2. The others share ``prefill_tokens`` in order; what does not fit runs in later steps.
        """
        budget = self._limits.prefill_tokens
        requests: list[Request] = []
        segments: list[Segment] = []
        for request in self._running.values():
            wanted = len(request.token_ids) - request.computed
            count = wanted
            if wanted > 1:  # otherwise 1
                count = min(wanted, budget)  # 2
                budget -= count
            if count:
                requests.append(request)
                segments.append(Segment(request.computed, count, request.blocks, wants_logits=count == wanted))
        return Plan(tuple(requests), Batch(tuple(segments)))

    def advance(self, plan: Plan) -> None:
        """Books that a plan's batch has run."""
        for request, segment in zip(plan.requests, plan.batch.segments, strict=True):
            request.computed = segment.stop

    def end(self, request: Request) -> None:
        """Forgets a request and frees its blocks, wherever it stands.

        Raises:
            EngineFailed: it was the last one, and yet some blocks are not free.
        """
        if self._running.pop(request.key, None) is None:
            del self._waiting[request.key]
        self._pool.release(request.key)
        if not self._running and self._pool.free_blocks != self._pool.num_blocks:
            raise EngineFailed(
                f"{self._pool.num_blocks - self._pool.free_blocks} KV blocks leaked: nothing runs, yet they are owned"
            )
