"""What runs after a batch, planned before the batch's tokens are known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pilotlight.engine.core.batch import Plan, Segment
from pilotlight.engine.core.ending import waits
from pilotlight.engine.core.newcomers import NOBODY, Newcomers
from pilotlight.engine.core.promises import Outlook
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.sharing import plan_of
from pilotlight.policy.request import RequestKey

Requests = dict[RequestKey, Request]


@dataclass(frozen=True, slots=True)
class _Going:
    """Where those that run stand when a plan has run, oldest first."""

    under_way: Mapping[Request, Segment]
    streams: Requests
    """Each has its token from the plan, and goes on."""
    pieces: Requests
    """Prompts of which the plan ran a part."""
    begun: Requests
    """Prompts that have no part in it."""
    some_end: bool
    """With their token from the plan."""


@dataclass(frozen=True, slots=True)
class Following:
    """One stage's.

    1. Each stream has its next token. Those that end with the plan's are left out; others may end
       with it, too (a stop token): what their rows give is dropped then.
    2. Prompts go on, and join, as in a step that is planned later (``BatchScheduler.schedule``):
       behind a step of streams, which is short, and where it is known when the plan ends. What
       comes before that is to share the step.
    3. Nothing follows where the tokens have to be known first: a place becomes free for one that
       waits, a request has no room for one token more, or the next one may not run.
    """

    newcomers: Newcomers

    def plan(
        self, plan: Plan, now_s: float, may_run: Callable[[Request], bool], ends_s: float | None
    ) -> Plan | None:
        """What follows; the plan is still to be booked (``BatchScheduler.advance``), before this.

        Args:
            plan: that is under way.
            now_s: on the engine's clock.
            may_run: whether a prompt may be in a step that is launched before the tokens are known.
            ends_s: when the plan does, which is soon; None: not known.
        """
        going = self._going(plan)
        if not (going.streams or going.pieces):
            return None
        come = self._come(going, now_s)
        if come is None:
            return None
        prompts = bool(going.begun or going.pieces or come)
        if prompts:
            short = all(segment.count == 1 for segment in plan.batch.segments)
            begun = (*going.begun.values(), *going.pieces.values())
            may = all(one.wanted > 1 and may_run(one) for one in begun)
            if not (may and (short or ends_s is not None)):  # 2
                return None
            if come and not may_run(self.newcomers.next(now_s)):  # 3
                return None
        if not all(self.newcomers.tables.grow(one, ahead=1) for one in going.streams.values()):
            return None
        counts, taken = dict.fromkeys(going.streams, 1), NOBODY
        if prompts:
            # What follows on the device finds in place what the plan runs; streams want one token.
            for one in going.pieces.values():
                one.computed = going.under_way[one].stop
            for one in going.streams.values():
                one.computed = going.under_way[one].stop - 1
            sharing, queue = self.newcomers.sharing, self.newcomers.queue
            promises = self.newcomers.promises
            if ends_s is None:
                ends_s = now_s + promises.streams_s(going.streams.values())
            running = going.streams | going.begun | going.pieces
            share = sharing.of_step(running, queue, promises, ends_s, under_way=1)
            counts = sharing.among(running, None, share)
            if come:
                left = sharing.left_for_newcomers(running, counts, share)
                places = self.newcomers.limits.running
                taken = self.newcomers.take_up(ends_s, left, places, share.cap, may_run)
                counts |= taken.counts
        return self._of(going, counts, taken.looked_up_tokens, taken.hit_tokens)

    def _going(self, plan: Plan) -> _Going:
        # By the request itself: one that has gone and come back under the same key stands
        # elsewhere.
        under_way = dict(zip(plan.requests, plan.batch.segments, strict=True))
        streams, pieces, begun, some_end = Requests(), Requests(), Requests(), False
        for key, one in self.newcomers.running.items():
            segment = under_way.get(one)
            if segment is None:
                begun[key] = one
            elif not segment.wants_logits:
                pieces[key] = one
            elif one.about_to_end:
                some_end = True
            else:
                streams[key] = one
        return _Going(under_way, streams, pieces, begun, some_end)

    def _come(self, going: _Going, now_s: float) -> bool | None:
        """Whether somebody who waits may join now; None: when one of the others has ended."""
        newcomers = self.newcomers
        outlook = Outlook(newcomers.promises, going.streams.values(), now_s)
        if not newcomers.queue or waits(newcomers.limits, newcomers.queue, outlook):
            return False
        if not newcomers.have_no_place(now_s):
            return True
        return None if going.some_end else False

    def _of(
        self, going: _Going, counts: Mapping[RequestKey, int], looked_up: int, hits: int
    ) -> Plan | None:
        tables = self.newcomers.tables
        requests, segments = list[Request](), list[Segment]()
        for key, one in self.newcomers.running.items():
            if key in going.streams:
                start = going.under_way[one].stop
                blocks = tables.blocks(one, start + 1)
                segments.append(Segment(start, 1, blocks, wants_logits=True))
            elif counts.get(key):
                segments.append(tables.segment(one, counts[key]))
            else:
                continue
            requests.append(one)
        return plan_of(tuple(requests), tuple(segments), looked_up, hits) if requests else None
