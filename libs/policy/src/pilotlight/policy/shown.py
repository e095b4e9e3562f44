"""What workers show beside their starts: how their engines came up, and what steps take.

ParaServe takes t_cc, t_cu, t_l, t_d and t_n as "historical information" (sections 4.1.2 and 5).
Workers report means, and only when these have changed; the scheduler learns from what is reported
(``coldstart.timings``).
"""

import math
from dataclasses import dataclass, replace

FIRST_AFTER_S = 2.0
"""A new instance's times are told as soon as there are enough."""
AGAIN_AFTER_S = 60.0
"""Later ones are told so seldom: what is told changes a report."""
LEAST_STEPS = 16
"""Fewer are no mean."""
NEVER_S = -math.inf
LEAST_CHANGE = 0.1
"""Of any mean, in proportion: less is no news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What a worker's engine took to come up, in seconds; 0: this start does not show it.

    An engine that was a spare has its process and its libraries from before.
    """

    create_s: float = 0.0
    """t_cc: its process."""
    context_s: float = 0.0
    """t_cu: its device opened, measured and warm."""
    libraries_s: float = 0.0
    """t_l: what it imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Means over some steps of one stage's engine."""

    steps: int = 0
    """Decode steps: every request that ran got one token, and no prompt was worked on."""
    batch: float = 0.0
    """Requests of a step."""
    context_tokens: float = 0.0
    """Of all of them together."""
    step_s: float = 0.0
    hops: int = 0
    """Micro-batches that went round the stages alone."""
    hop_s: float = 0.0
    """Of one hop between neighbours, without what stages computed."""

    def is_news(self, told: "StageTimes") -> bool:
        """Whether it says something else than what was told."""
        pairs = (
            (self.batch, told.batch),
            (self.context_tokens, told.context_tokens),
            (self.step_s, told.step_s),
            (self.hop_s, told.hop_s),
        )
        return any(abs(new - old) > LEAST_CHANGE * old for new, old in pairs if new > 0)


NO_TIMES = StageTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSeen:
    """Sums over the steps of one stage since its times were told last."""

    since_s: float = NEVER_S
    steps: int = 0
    requests: int = 0
    context_tokens: int = 0
    step_s: float = 0.0
    hops: int = 0
    hop_s: float = 0.0
    told: StageTimes = NO_TIMES

    def decoded(self, batch: int, context_tokens: int, step_s: float) -> "StepsSeen":
        """With one more decode step."""
        return replace(
            self,
            steps=self.steps + 1,
            requests=self.requests + batch,
            context_tokens=self.context_tokens + context_tokens,
            step_s=self.step_s + step_s,
        )

    def hopped(self, hop_s: float) -> "StepsSeen":
        """With one more micro-batch that went round."""
        return replace(self, hops=self.hops + 1, hop_s=self.hop_s + hop_s)

    def at(self, now_s: float) -> "StepsSeen":
        """As of a moment: means that are due and news are told, and the sums begin anew.

        1. the time counts from the first look
        2. not before there are enough steps, or hops, and the time has passed
        3. what is as it was told is not told again
        """
        if self.since_s == NEVER_S:  # 1
            return replace(self, since_s=now_s)
        wait_s = FIRST_AFTER_S if self.told == NO_TIMES else AGAIN_AFTER_S
        if max(self.steps, self.hops) < LEAST_STEPS or now_s - self.since_s < wait_s:  # 2
            return self
        means = StageTimes(
            steps=self.steps,
            batch=self.requests / max(1, self.steps),
            context_tokens=self.context_tokens / max(1, self.steps),
            step_s=self.step_s / max(1, self.steps),
            hops=self.hops,
            hop_s=self.hop_s / max(1, self.hops),
        )
        told = means if means.is_news(self.told) else self.told  # 3
        return StepsSeen(since_s=now_s, told=told)


NO_STEPS = StepsSeen()
