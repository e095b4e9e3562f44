"""What requests are promised (their model's SLO), and what a step may hold so that it is kept.

As long as nothing is in danger, nothing is done for it: prompts run first come, first served.
Beside streams they are cut as without promises, whatever is in danger: whole, they run at lengths
that no step had before, and if their kernels compile, the next first token is in danger, too.
There are three questions:

1. *Who is next?* Of those that wait, as many as can be are to have their first token in time:
   Moore's rule ("An n job, one machine sequencing algorithm for minimizing the number of late
   jobs", Management Science 15, 1968). Who is late already is late anyway, and goes behind; not for
   ever (``waiting``).
2. *May one more run?* Not where a step of streams alone would take more than a share of the time
   promised for a token: the rest is what prompts live on. One that waits is the sign to the
   scheduler that another instance is needed; one that runs would make all of them late. Nor where
   the prompts that it would share a step with would be late by it.
3. *How much of prompts fits into this step?* As much as leaves each stream with a lead.

What is not known yet, or was not promised, limits nothing. Neither does a promise that one stream
alone does not keep.
"""

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from pilotlight.engine.core.pace import Pace, prompt_work
from pilotlight.engine.core.request import Request

STREAMS_SHARE = 0.5
"""Of the time promised for a token, what a step of streams alone may take."""
TOKEN_SHARE = 0.95
"""Of the time promised for a token, what steps aim at: the rest is for what is not foreseen."""
GRACE_TOKENS = 20
"""A stream may be behind by as many, if four times as many are to come: its mean counts."""
LEAST_TOKENS = 256
"""Of prompts in a step, whatever is promised: they end, too."""
WORTH_TOKENS = 1024
"""Of prompts in a step: fewer are waited with until there is room, if there are more."""
GAINED = 0.6
"""Of the time promised for a token: streams whose steps take less get ahead, also those whose grace
goes down by a token for four."""
LOOKED_AT = 64
"""Of those that wait: what is behind them is in no step that is planned now."""
DELIVERY_S = 0.025
"""From the end of a step to whoever asked, the next step's launch and the way to this engine with
it. What is counted too little comes just too late, when an instance has all that it can do."""


@dataclass(slots=True)
class Promises:
    """Those of one stage's requests."""

    kept: bool
    """``BatchLimits.keep_promises``."""
    pace: Pace = field(default_factory=Pace)

    def in_time(self, request: Request, now_s: float) -> bool:
        """Whether its first token can still come in time."""
        if not self.kept or request.due_s is None:
            return True
        return now_s + self._runs_s(request) + DELIVERY_S <= request.due_s

    def choice(
        self, timely: Collection[Request], running: Iterable[Request], now_s: float
    ) -> Request:
        """Which of those that can be in time is next, so that most of them will be.

        Args:
            timely: in the order in which they came; there is one.
            running: their prompts end before.
            now_s: on the engine's clock.
        """
        first, token_s = next(iter(timely)), self.pace.prompt_token_s
        if not self.kept or len(timely) == 1 or not token_s:
            return first
        begin_s = now_s + self._ahead_s(running) + DELIVERY_S
        kept = most_in_time(
            [
                (request.due_s, token_s * prompt_work(request.computed, request.wanted), place)
                for place, request in enumerate(islice(timely, LOOKED_AT))
                if request.due_s is not None
            ],
            begin_s,
        )
        if kept is None:
            return first
        return next((one for place, one in enumerate(timely) if place in kept), first)

    def spare_s(
        self, waiting: Iterable[Request], running: Iterable[Request], now_s: float
    ) -> float:
        """How long those that wait can do so, and have their first tokens in time, one after the
        other.

        Args:
            waiting: in the order in which they came.
            running: their prompts end before.
            now_s: on the engine's clock.

        Returns:
            Seconds; infinity, where nothing is promised; less than none, where what steps take is
                not known.
        """
        spare_s, ends_s = math.inf, now_s + self._ahead_s(running) + DELIVERY_S
        for one in waiting:
            ends_s += self._runs_s(one)
            if self.kept and one.due_s is not None:
                spare_s = min(spare_s, one.due_s - ends_s)
        known = bool(self.pace.prompt_token_s) or spare_s == math.inf
        return spare_s if known else -math.inf

    def crowded(self, running: Collection[Request], request: Request, now_s: float) -> bool:
        """Whether those that run would be late if this one ran, too."""
        if not self.kept or not running:
            return False
        contexts = [len(one.token_ids) for one in running]
        if request.token_s is not None:
            most_s = STREAMS_SHARE * request.token_s
            own = len(request.token_ids)
            alone_s, all_s = self.pace.streams_s([own]), self.pace.streams_s([*contexts, own])
            if alone_s is not None and all_s is not None and alone_s <= most_s < all_s:
                return True
        prompts = [one for one in running if one.wanted > 1 and one.due_s is not None]
        without_s = now_s + self._ahead_s(running) + DELIVERY_S if prompts else 0.0
        with_s = without_s + self._runs_s(request)
        return any(without_s <= one.due_s < with_s for one in prompts if one.due_s is not None)

    def streams_s(self, streams: Iterable[Request]) -> float:
        """What a step of these takes; 0, where that is not known."""
        return self.pace.streams_s(map(_context, streams)) or 0.0

    def prompt_tokens(
        self, streams: Collection[Request], wanted: int, now_s: float, under_way: int = 0
    ) -> int | None:
        """Tokens of prompts that a step may hold beside streams; None: as many as it can.

        Streams that are late already are not waited for. Thin slices cost most: where a step has no
        room for one that is worth it, and streams get ahead without, it holds none.

        Args:
            streams: that have a token of the step.
            wanted: tokens of prompts, as far as it matters (``WORTH_TOKENS``).
            now_s: on the engine's clock, when it begins.
            under_way: tokens of each stream that will be there by then.
        """
        token_s = self.pace.prompt_token_s
        if not self.kept or not token_s:
            return None
        leads = [
            lead_s for one in streams if (lead_s := _lead_s(one, now_s, under_way)) is not None
        ]
        if not leads:
            return None
        streams_s = self.streams_s(streams)
        worth_s = streams_s + token_s * min(wanted, WORTH_TOKENS)
        gains = [GAINED * one.token_s > streams_s for one in streams if one.token_s is not None]
        if min(leads) < max(worth_s, self.pace.launches_s) and all(gains):
            return 0
        return max(LEAST_TOKENS, int((min(leads) - streams_s) / token_s))

    def _runs_s(self, request: Request) -> float:
        """What its prompt adds to the steps that it is in."""
        return (self.pace.prompt_token_s or 0.0) * prompt_work(request.computed, request.wanted)

    def _ahead_s(self, running: Iterable[Request]) -> float:
        """One step of those that run, with all of their prompts."""
        prompts_s, contexts = 0.0, list[int]()
        for one in running:
            if one.wanted > 1:
                prompts_s += self._runs_s(one)
            else:
                contexts.append(len(one.token_ids))
        streams_s = (self.pace.streams_s(contexts) or 0.0) if contexts else 0.0
        return streams_s + prompts_s


@dataclass(frozen=True, slots=True)
class Outlook:
    """What promises make of those that wait (``waiting.Order``)."""

    promises: Promises
    running: Collection[Request]
    """Whose prompts end before."""
    now_s: float

    def in_time(self, request: Request) -> bool:
        """Whether a request's first token can still come in time."""
        return self.promises.in_time(request, self.now_s)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step in which each of those that run is given a token; None: not known."""
        return self.promises.pace.streams_s(map(_context, self.running))

    def spare_s(self, waiting: Iterable[Request]) -> float:
        """How long those that wait can do so, and have their first tokens in time."""
        return self.promises.spare_s(waiting, self.running, self.now_s)

    def choice(self, timely: Collection[Request]) -> Request:
        """Which of those that can be in time is next, so that most of them will be."""
        return self.promises.choice(timely, self.running, self.now_s)


def most_in_time(jobs: Iterable[tuple[float, float, int]], begin_s: float) -> set[int] | None:
    """Which of them run so that most end in time (Moore's rule).

    In order of dues; when one would end late, the longest so far is left out.

    Args:
        jobs: when each is due, how long it takes, and its name.
        begin_s: of the first.

    Returns:
        Their names; None: all.
    """
    jobs = sorted(jobs)
    if jobs and begin_s + sum(runs_s for _, runs_s, _ in jobs) <= jobs[0][0]:
        return None  # as mostly, and told sooner
    ends_s, longest = begin_s, list[tuple[float, int]]()
    left_out = False
    for due_s, runs_s, name in jobs:
        ends_s += runs_s
        heapq.heappush(longest, (-runs_s, name))
        if ends_s > due_s:
            left_out = True
            ends_s += heapq.heappop(longest)[0]
    return {name for _, name in longest} if left_out else None


def _context(stream: Request) -> int:
    return len(stream.token_ids)


def _lead_s(stream: Request, now_s: float, under_way: int) -> float | None:
    """How long it can wait for its next token, behind those under way; None: it is promised
    nothing, or late anyway.
    """
    if stream.token_s is None:
        return None
    grace = min(GRACE_TOKENS, (stream.kv_tokens - len(stream.token_ids)) // 4) + under_way
    lead_s = stream.lead_s(now_s, grace)
    if lead_s is None or lead_s <= 0.0:
        return None
    aimed_s = stream.lead_s(now_s, grace, TOKEN_SHARE) or 0.0
    return max(aimed_s, TOKEN_SHARE * stream.token_s)
