"""A stage without tensors: its KV cache is a list that remembers, for each slot, which tokens its
content was computed from.

A token of the output is a function of all tokens before it, and it is made from what the block
table says is in place. So a block that is leaked, shared wrongly, overwritten or read before it is
written shows as a wrong content or a wrong token.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.engine.core.admission import check_kv_room
from pilotlight.engine.core.blocks import BLOCK_TOKENS, BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent, RequestState
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import Promise, RequestKey, Sampling

VOCABULARY = 3
CONTEXT_TOKENS = 400


def content_after(content: int, token_id: int) -> int:
    """What a position holds: all tokens up to it, as one number."""
    return (content * 1_000_003 + token_id + 1) % (1 << 61)


def next_token(content: int, seed: int) -> int:
    return (content ^ seed) // 7 % VOCABULARY


def expected_output(prompt_ids: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """What a request gives that is alone in the world."""
    content, output = 0, []
    for token_id in prompt_ids:
        content = content_after(content, token_id)
    for _ in range(num_tokens):
        output.append(next_token(content, seed))
        content = content_after(content, output[-1])
    return output


@dataclass
class PaperStage:
    num_blocks: int
    limits: BatchLimits
    now_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    adopted: int = 0
    overdue: list[Request] = field(default_factory=list)
    ended: dict[RequestKey, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.tables = BlockTables(self.pool, "paper", prefix_cache=self.limits.prefix_cache)
        self.scheduler = BatchScheduler(self.tables, self.limits)
        self.memory = [-1] * (self.num_blocks * BLOCK_TOKENS)
        self._contents: dict[RequestKey, list[int]] = {}
        self.arrived: list[RequestKey] = []
        """In the order of the row. A request that moves here with KV goes before those that wait.
        """
        self.ends_by: dict[RequestKey, int] = {}
        """The step in which each must have ended, where one tenant is alone."""
        self.tenants: set[str] = set()
        self.promises = False
        """Something was promised: who is late is overtaken."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        seed: int = 0,
        deadline_s: float | None = None,
        share: FairShare = NO_TENANT,
        promise: Promise | None = None,
    ) -> Request:
        """Raises NoRoom when it can never fit."""
        key = RequestKey(RequestId(f"r{len(self.arrived)}"), 1)
        request = Request(
            key,
            prompt_ids,
            (),
            Sampling(seed=seed, max_tokens=num_tokens),
            CONTEXT_TOKENS,
            deadline_s,
        )
        request.stands(share, promise, self.now_s)
        check_kv_room(self.num_blocks * BLOCK_TOKENS, request)
        self.scheduler.submit(request)
        self.tenants.add(share.tenant)
        self.promises |= promise is not None
        self.arrived.append(key)
        self.ends_by[key] = max(
            (self.ends_by[other.key] for other in self.scheduler.requests[:-1]), default=self.steps
        )
        self.ends_by[key] += request.kv_tokens
        return request

    def move(self, request: Request, *, with_kv: bool) -> Request:
        """It leaves, and comes at once as from elsewhere: with what was in place, if there is room
        for it now, or with its tokens alone.
        """
        segment = self.scheduler.placed(request) if with_kv else None
        kept = self._read(segment.blocks)[: segment.stop] if segment is not None else []
        self.drop(request)
        key = RequestKey(request.key.request_id, request.key.attempt + 1)
        prompt_ids, output_ids = (
            request.token_ids[: request.prompt_tokens],
            request.token_ids[request.prompt_tokens :],
        )
        moved = Request(
            key, prompt_ids, output_ids, request.sampling, CONTEXT_TOKENS, request.deadline_s
        )
        moved.share = request.share
        running = self.scheduler.running
        segment = self.scheduler.adopt(moved, self.now_s) if kept else None
        if segment is None:
            self.scheduler.submit(moved)
            self.arrived.append(key)
        else:
            self.adopted += 1
            stop = min(len(kept), len(moved.token_ids) - 1)
            for position in range(segment.start, stop):
                slot = (
                    segment.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS
                    + position % BLOCK_TOKENS
                )
                self.memory[slot] = kept[position]
            moved.computed = max(segment.start, stop)
            waiting = self.scheduler.requests[running + 1 :]
            place = min(
                (self.arrived.index(other.key) for other in waiting), default=len(self.arrived)
            )
            self.arrived.insert(place, key)
        self._promise()
        self.check()
        return moved

    def _promise(self) -> None:
        """In each step the oldest runs a token at least, and it is never preempted: so long may
        each request take from now on.
        """
        ends = itertools.accumulate(
            (request.kv_tokens for request in self.scheduler.requests), initial=self.steps
        )
        self.ends_by = dict(
            zip((request.key for request in self.scheduler.requests), list(ends)[1:], strict=True)
        )

    def drop(self, request: Request) -> None:
        self.scheduler.end(request, RequestEvent.DROP)
        self.ended[request.key] = request

    def resize(self, num_blocks: int) -> None:
        """Raises NoRoom when a request here could not be served then."""
        moves = self.scheduler.resize(num_blocks)
        assert not moves.keys() & set(moves.values())
        size = num_blocks * BLOCK_TOKENS
        memory = self.memory[:size] + [-1] * (size - len(self.memory))
        for old, new in moves.items():
            memory[new * BLOCK_TOKENS : (new + 1) * BLOCK_TOKENS] = self.memory[
                old * BLOCK_TOKENS : (old + 1) * BLOCK_TOKENS
            ]
        self.memory, self.num_blocks = memory, num_blocks
        self._promise()  # Even the oldest may have lost its blocks.
        self.check()

    def step(self) -> list[tuple[str, int, int]]:
        """One step; which requests ran which tokens."""
        for request in self.scheduler.overdue(self.now_s):
            self.overdue.append(request)
            self.drop(request)
        oldest = next(iter(self.scheduler.requests), None)
        had_run = oldest is not None and oldest.takes > 0
        plan = self.scheduler.schedule(self.now_s)
        self.steps += 1
        self.preemptions += plan.preempted
        self.hit_tokens += plan.prefix_hit_tokens
        assert sum(segment.count for segment in plan.batch.segments) <= self.limits.step_tokens
        assert (oldest is None) == (not plan.requests)
        # Where nothing runs, the turn may be another tenant's.
        if oldest is not None and (len(self.tenants) == 1 or had_run):
            assert plan.requests[0] is oldest, "the oldest request runs in every step"
        self._run(plan.requests, plan.batch.segments)
        self.scheduler.advance(plan)
        for request in plan.sampled:
            self.scheduler.vouch(request)
            if request.accept(next_token(self._contents_of(request)[-1], request.sampling.seed)):
                self.scheduler.end(request, RequestEvent.FINISH)
                self.ended[request.key] = request
        self.check()
        return [
            (request.key.request_id, segment.start, segment.stop)
            for request, segment in zip(plan.requests, plan.batch.segments, strict=True)
        ]

    def _run(self, requests, segments) -> None:
        """Writes all new content first, as a layer does, then reads what each request attends
        to.
        """
        written = set[int]()
        for request, segment in zip(requests, segments, strict=True):
            contents = self._contents_of(request)
            for position in range(segment.start, segment.stop):
                slot = (
                    segment.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS
                    + position % BLOCK_TOKENS
                )
                assert slot not in written, "two requests write into one slot"
                written.add(slot)
                self.memory[slot] = contents[position]
        for request, segment in zip(requests, segments, strict=True):
            expected = self._contents_of(request)[: segment.stop]
            assert self._read(segment.blocks)[: segment.stop] == expected, (
                f"{request.key} reads what is not its own"
            )

    def _read(self, blocks: Sequence[int]) -> list[int]:
        return [
            self.memory[block * BLOCK_TOKENS + offset]
            for block in blocks
            for offset in range(BLOCK_TOKENS)
        ]

    def _contents_of(self, request: Request) -> list[int]:
        """What each position of a request is to hold."""
        contents = self._contents.setdefault(request.key, [])
        for token_id in request.token_ids[len(contents) :]:
            contents.append(content_after(contents[-1] if contents else 0, token_id))
        return contents

    def check(self) -> None:
        """What holds between steps."""
        self.tables.check()
        kept = self.limits.keep_promises
        assert (
            len(self.tenants) > 1
            or kept
            or all(self.steps <= self.ends_by[request.key] for request in self.scheduler.requests)
        ), "a request starves"
        for tenant in self.tenants:
            row = [
                self.arrived.index(request.key)
                for request in self.scheduler.requests
                if request.share.tenant == tenant
            ]
            assert self.promises or row == sorted(row), (
                "a tenant's requests stand in the order in which they came"
            )
        running = self.scheduler.running
        assert running <= self.limits.running
        for index, request in enumerate(self.scheduler.requests):
            assert (request.state is RequestState.RUNNING) == (index < running)
        if not running:
            assert self.pool.free_blocks == self.num_blocks

    def drain(self) -> None:
        """Steps to the end of all requests."""
        while self.scheduler.has_work:
            self.step()
