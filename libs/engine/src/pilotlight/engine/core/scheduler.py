"""Continuous batching on one instance: which requests wait, which run, what the next forward pass
holds.

The requests stand in one row, as they were taken up or else came; those that run are its head::

    [ running: own blocks, take part in steps )[ preempted )[ waiting )
      oldest ......................... youngest

=========  ========  =========  ==================================================================================
state      event     next       what happens
=========  ========  =========  ==================================================================================
           submit    waiting    goes to the end of the row
waiting    take_up   running    shares the cached blocks of its prefix, gets blocks for the rest of its tokens
running    run       running    some of its tokens run; with the last of them the next one is sampled
running    preempt   preempted  gives up its blocks to an older one; what they hold stays cached until it is needed
preempted  take_up   running    as from waiting: what is no longer cached runs again, prompt and output alike
running    finish    ended      its last token is sampled, or its logits are unusable
any        drop      ended      cancelled, overdue, gone elsewhere, or its stage dropped: its blocks are free at once
=========  ========  =========  ==================================================================================

What follows from the row:

* No request starves. The oldest request gets a token in every step, and whatever block it lacks is
  taken from younger ones; admission sees to it that it fits alone. So it ends after as many steps
  as it has tokens at most, and then the next one is the oldest.
* On the way in, preempted requests go before those that never ran, tenants take turns by weight,
  and one that has no room holds up those behind it. What cannot be in time any more is overtaken,
  a bounded number of times (``waiting``).
* A request's tokens do not depend on any of this: a token is a function of the tokens before it,
  the seed and its position.

No clock and no randomness: the same calls give the same plans.
"""

import math
from collections.abc import Callable

from pilotlight.engine.core.admission import check_kv_room
from pilotlight.engine.core.batch import Plan, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.ending import waits
from pilotlight.engine.core.following import Following
from pilotlight.engine.core.lifecycle import RequestEvent, RequestState
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.newcomers import NOBODY, Newcomers, anybody
from pilotlight.engine.core.promises import Outlook, Promises
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.sharing import Sharing, plan_of
from pilotlight.engine.core.tables import BlockTables
from pilotlight.engine.core.waiting import WaitingRow
from pilotlight.engine.errors import EngineFailed
from pilotlight.policy.request import RequestKey


class BatchScheduler:
    """Owns a stage's requests and has the block tables of those that run."""

    def __init__(
        self, tables: BlockTables, limits: BatchLimits, *, whole_prompts: bool = False
    ) -> None:
        """Has nothing to do yet.

        Args:
            tables: blocks of the stage.
            limits: of its batches.
            whole_prompts: as in ``Sharing``.
        """
        self._tables = tables
        self._limits = limits
        self._sharing = Sharing(limits, whole_prompts)
        self.promises = Promises(limits.keep_promises)
        self._running: dict[RequestKey, Request] = {}
        """Oldest first."""
        self._queue = WaitingRow()
        """All others, and whose turn is next."""
        self._newcomers = Newcomers(
            limits=limits,
            tables=tables,
            sharing=self._sharing,
            promises=self.promises,
            running=self._running,
            queue=self._queue,
        )
        self._following = Following(self._newcomers)

    @property
    def waiting(self) -> int:
        """Requests that own no blocks."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that own blocks."""
        return len(self._running)

    @property
    def kv_free_tokens(self) -> int:
        """Room for tokens that no request owns."""
        return self._tables.pool.free_blocks * BLOCK_TOKENS

    @property
    def kv_used_tokens(self) -> int:
        """Room in blocks that requests own, filled or not."""
        return (self._tables.pool.num_blocks - self._tables.pool.free_blocks) * BLOCK_TOKENS

    @property
    def kv_capacity_tokens(self) -> int:
        """Room of all blocks."""
        return self._tables.pool.num_blocks * BLOCK_TOKENS

    @property
    def kv_cached_tokens(self) -> int:
        """As much of the free room holds prefixes that a request may meet again."""
        return self._tables.pool.cached_blocks * BLOCK_TOKENS

    @property
    def has_work(self) -> bool:
        """Some request wants tokens."""
        return bool(self._queue or self._running)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All that have not ended, oldest first."""
        return (*self._running.values(), *self._queue)

    def find(self, key: RequestKey) -> Request | None:
        """The request, if it has not ended."""
        return self._running.get(key) or self._queue.find(key)

    def overdue(self, now_s: float) -> tuple[Request, ...]:
        """Requests whose deadline has passed; the caller ends them."""
        return tuple(request for request in self.requests if request.overdue(now_s))

    def submit(self, request: Request) -> None:
        """Queues a request that passed admission."""
        self._queue.add(request)

    def schedule(self, now_s: float, at_most: int | None = None) -> Plan:
        """The next forward pass; it holds the oldest one, unless a token of it is under way.

        With ``at_most``, it holds no more requests than that: those that are left make the next
        micro-batch. One whose next token is under way is booked as run (``advance``), and in none.

        1. The step's tokens are shared: one for each running request that wants no more, the rest
           to the others in order. Where there is one of the first kind, the others get no more
           than ``chunk_tokens`` each and a short rest, and what promises allow (``promises``).
        2. Oldest first, each request that is to run gets the block that it lacks. While none is
           free, the youngest gives up its own; the youngest itself sits this step out instead.
        3. If no request had to give up blocks, requests are taken up as far as places, tokens and
           blocks go, unless they wait for others (``gathering``) or for a batch's end (``ending``),
           or those that run would be late. None behind one that gets only a part: it came first.
        """
        share = self._sharing.of_step(self._running, self._queue, self.promises, now_s)
        counts = self._sharing.among(self._running, at_most, share)  # 1
        preempted = self._make_room(counts)  # 2
        places = self._limits.running if at_most is None else at_most - len(counts)
        left = self._sharing.left_for_newcomers(self._running, counts, share)
        outlook = Outlook(self.promises, self._running.values(), now_s)
        idle = preempted or waits(self._limits, self._queue, outlook)
        taken = NOBODY if idle else self._newcomers.take_up(now_s, left, places, share.cap)  # 3
        counts |= taken.counts
        requests = tuple(request for key, request in self._running.items() if counts.get(key))
        segments = tuple(self._tables.segment(request, counts[request.key]) for request in requests)
        looked_up, hits = taken.looked_up_tokens, taken.hit_tokens
        return plan_of(requests, segments, looked_up, hits, preempted)

    def _make_room(self, counts: dict[RequestKey, int]) -> int:
        """Gives each request the block that it lacks, and strikes off those that cannot run; how
        many were preempted.

        Only a request that wants one token can lack a block: it was taken up with blocks for all
        others.
        """
        preempted = 0
        for request in tuple(self._running.values()):
            if request.key not in self._running:
                break  # It was preempted, and so were all that are younger.
            while not self._tables.grow(request):
                youngest = next(reversed(self._running.values()))
                counts.pop(youngest.key, None)
                if youngest is request:
                    break
                self._preempt(youngest)
                preempted += 1
        return preempted

    def _preempt(self, request: Request) -> None:
        request.on(RequestEvent.PREEMPT)
        self._tables.close(request)
        request.computed = 0
        del self._running[request.key]
        self._queue.put_back(request)

    def adopt(self, request: Request, now_s: float) -> Segment | None:
        """Takes a request up at once that passed admission and whose keys and values come from
        elsewhere.

        It came before those that wait here: it was running already.

        Returns:
            Where the positions go that are not in place (those that are cached here, are), up to
            its last token, which has to run; None if there is no place or no room for it now. The
            caller fills them before the next step.
        """
        if len(self._running) >= self._limits.running:
            return None
        in_place = self._tables.open(request, spare_blocks=len(self._running))
        if in_place is None:
            return None
        request.taken_s = now_s
        self._newcomers.run(request, in_place)
        return self._tables.segment(request, request.wanted - 1)

    def placed(self, request: Request) -> Segment | None:
        """What of a request is in place, from its first token; None: it does not run."""
        if request.key not in self._running:
            return None
        return Segment(
            0, request.computed, self._tables.blocks(request, request.computed), wants_logits=False
        )

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Has ``num_blocks`` KV blocks from now on.

        The youngest are preempted while too few are left for those that run.

        Returns:
            Blocks whose content has to be copied, old to new.

        Raises:
            NoRoom: some request that is here could never be served then; nothing has changed.
        """
        for request in self.requests:
            check_kv_room(num_blocks * BLOCK_TOKENS, request)
        pool = self._tables.pool
        while pool.num_blocks - pool.free_blocks > num_blocks:
            self._preempt(next(reversed(self._running.values())))
        return self._tables.resize(num_blocks)

    @property
    def filled_blocks(self) -> set[int]:
        """The blocks that hold what is in place of the requests that run."""
        return {
            block
            for request in self._running.values()
            for block in self._tables.blocks(request, request.computed)
        }

    def preempt_all(self) -> None:
        """Takes the blocks of all requests away, forgets their content: everything runs again."""
        for request in reversed(tuple(self._running.values())):
            self._preempt(request)
        self.forget_cached()

    def forget_cached(self) -> None:
        """Finds no prefix again that was computed until now and that has no owner."""
        self._tables.pool.forget_cached()

    def follow_on(
        self,
        plan: Plan,
        now_s: float = math.inf,
        may_run: Callable[[Request], bool] = anybody,
        ends_s: float | None = None,
    ) -> Plan | None:
        """See ``Following.plan``."""
        return self._following.plan(plan, now_s, may_run, ends_s)

    def advance(self, plan: Plan) -> None:
        """Books that a plan's batch has run, for those of its requests that have not ended since it
        was made.
        """
        for request, segment in zip(plan.requests, plan.batch.segments, strict=True):
            if request.state is not RequestState.ENDED:
                request.on(RequestEvent.RUN)
                request.computed = segment.stop

    def postpone(self, request: Request) -> None:
        """Takes back that a request's last token has run: nothing could be sampled after it.

        It runs again later.
        """
        request.computed -= 1

    def vouch(self, request: Request) -> None:
        """Says that a request's logits are finite: others may share the full blocks that it
        computed.

        Not before: where one token makes a model overflow, attention makes all positions of the
        same chunk NaN, also those before the token (a masked NaN, times zero, is NaN). A request
        that shared these would fail for another's token. What is NaN anywhere shows in all logits
        after it.
        """
        self._tables.seal(request)

    def end(self, request: Request, event: RequestEvent) -> None:
        """Forgets a request and frees its blocks, wherever it stands.

        Raises:
            EngineFailed: it was the last one, and yet some blocks are not free.
        """
        request.on(event)
        request.release()
        self._tables.close(request)
        if self._running.pop(request.key, None) is None:
            self._queue.remove(request)
        pool = self._tables.pool
        if not self._running and pool.free_blocks != pool.num_blocks:
            raise EngineFailed(
                f"{pool.num_blocks - pool.free_blocks} KV blocks leaked: nothing runs, yet they are owned"
            )
