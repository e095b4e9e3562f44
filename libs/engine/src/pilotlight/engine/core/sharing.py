"""How the tokens of one step are shared."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from pilotlight.engine.core.batch import Batch, Plan, Segment, poolings_of, readings_of
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.promises import WORTH_TOKENS, Promises
from pilotlight.engine.core.request import Request
from pilotlight.policy.request import RequestKey

Running = Mapping[RequestKey, Request]
"""Requests that own blocks, oldest first."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one step may hold."""

    tokens: int
    """Of streams and prompts together."""
    cap: int
    """Of one prompt, and half as many more (``Sharing.portion``)."""


@dataclass(frozen=True, slots=True)
class TakenUp:
    """Requests that were taken up for a step."""

    counts: dict[RequestKey, int]
    looked_up_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rule of one model."""

    limits: BatchLimits
    whole_prompts: bool
    """A prompt runs in one step or not at all, since its tokens see each other. One that is longer
    than a step makes one alone."""

    def of_step(
        self,
        running: Running,
        waiting: Collection[Request],
        promises: Promises,
        now_s: float,
        under_way: int = 0,
    ) -> StepShare:
        """What prompts may have of a step: less where streams get their tokens, too.

        Args:
            running: oldest first.
            waiting: in the order in which they came.
            promises: that are to be kept.
            now_s: on the engine's clock, when it begins.
            under_way: tokens of each stream that will be there by then.
        """
        streams = [request for request in running.values() if request.wanted == 1]
        whole = self.limits.step_tokens
        begun = [request for request in running.values() if request.wanted > 1]
        if not streams or not (begun or waiting):
            return StepShare(whole, whole)
        wanted = 0
        for request in chain(begun, waiting):
            wanted += request.wanted
            if wanted >= WORTH_TOKENS:
                break
        tokens = promises.prompt_tokens(streams, wanted, now_s, under_way)
        tokens = whole if tokens is None else min(whole, len(streams) + tokens)
        return StepShare(tokens, min(self.limits.chunk_tokens or tokens, tokens))

    def portion(self, wanted: int, left: int, cap: int, *, first: bool) -> int:
        """How many of the tokens that a request wants run now.

        Args:
            wanted: as many does it want.
            left: of the step's.
            cap: of one prompt, and half as many more: each piece stretches a step, so there are as
                few as can be, of about one length.
            first: nothing else runs so far.
        """
        if not self.whole_prompts:
            return min(wanted if cap >= left else _piece(wanted, cap + cap // 2), left)
        return wanted if first or wanted <= left else 0

    def among(
        self, running: Running, at_most: int | None, share: StepShare
    ) -> dict[RequestKey, int]:
        """How many tokens each running request may run: one for each that wants no more, the rest
        to the others in order.

        Args:
            running: oldest first.
            at_most: requests of the step; None: all.
            share: of prompts.
        """
        ready = dict(
            islice(((key, request) for key, request in running.items() if request.wanted), at_most)
        )
        counts = {key: 1 for key, request in ready.items() if request.wanted == 1}
        left = share.tokens - len(counts)
        for key, request in ready.items():
            if request.wanted > 1:
                counts[key] = self.portion(request.wanted, left, share.cap, first=not counts)
                left = left_behind(request, counts[key], left)
        return counts

    def left_for_newcomers(
        self, running: Running, counts: Mapping[RequestKey, int], share: StepShare
    ) -> int:
        """Tokens of a step that requests may have which do not run yet."""
        if any(count < running[key].wanted for key, count in counts.items()):
            return 0
        return share.tokens - sum(counts.values())


def _piece(wanted: int, most: int) -> int:
    """The first of as few as can be, of about one length."""
    return -(-wanted // -(-wanted // most))


def left_behind(request: Request, count: int, left: int) -> int:
    """Of ``left`` tokens, what requests behind one may have that got ``count``: nothing, if it
    wants more, for it came first.
    """
    return left - count if count == request.wanted else 0


def plan_of(
    requests: tuple[Request, ...],
    segments: tuple[Segment, ...],
    looked_up_tokens: int,
    hit_tokens: int,
    preempted: int = 0,
) -> Plan:
    """A step of these.

    Args:
        requests: oldest first.
        segments: theirs.
        looked_up_tokens: of those that were taken up for it.
        hit_tokens: as many of them were in place.
        preempted: as many gave up their blocks for it.
    """
    return Plan(
        requests=requests,
        batch=Batch(segments, readings_of(requests, segments), poolings_of(requests, segments)),
        preempted=preempted,
        prefix_looked_up_tokens=looked_up_tokens,
        prefix_hit_tokens=hit_tokens,
    )
