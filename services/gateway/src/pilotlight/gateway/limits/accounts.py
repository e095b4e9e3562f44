"""What one key, or one project, has taken of its limits, as far as this gateway knows."""

from dataclasses import dataclass, field

import msgspec

from pilotlight.common.messages.limits import LimitTotal
from pilotlight.policy.rate_limits import (
    Charge,
    Meter,
    charge_of,
    give_back,
    left,
    owed,
    rescaled,
    returnable,
    share_of,
    take,
    unheard_bound,
    wait_s,
)
from pilotlight.policy.tenants import TenantLimits

FORGET_PER_TELLING = 0.95
"""What is left of the recent past after each exchange: about the last second counts."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Between how many gateways limits are shared."""

    gateways: int = 1
    cut_off: bool = False
    """Nothing is heard of the others: each takes an equal share for itself."""
    factor: int = field(init=False)
    """How often what is taken counts: without news, the others are taken to do the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", self.gateways if self.cut_off else 1)


class Taken(msgspec.Struct, frozen=True, gc=False):
    """One request's charge on one line."""

    charge: Charge
    units: float
    factor: int


class Unheard:
    """What was let in and others may not know of yet: since the telling before the last one.

    When it tells, their news of the same time is still on its way: what is left then is known at
    its next telling.
    """

    __slots__ = ("_on_its_way", "fresh")

    def __init__(self) -> None:
        self.fresh = self._on_its_way = 0.0
        """Let in since the last telling."""

    @property
    def units(self) -> float:
        """All of it."""
        return self.fresh + self._on_its_way

    def told(self) -> float:
        """Others are told; returns what they know of by now."""
        heard, self._on_its_way, self.fresh = self._on_its_way, self.fresh, 0.0
        return heard


class Line:
    """Requests, or tokens, per minute."""

    __slots__ = ("_everyone", "_own", "limit", "meter", "spent", "unheard")

    def __init__(self) -> None:
        self.limit: int | None = None
        self.meter = Meter()
        self.spent = 0.0
        """By this gateway, in its life."""
        self.unheard = Unheard()
        self._own = self._everyone = 0.0
        """Of late, as far as all know of it."""

    def set(self, limit: int | None, now_s: float) -> None:
        """Hold it to this from now on."""
        if limit is not None and self.limit is not None and limit != self.limit:
            self.meter = rescaled(self.meter, self.limit, limit, now_s)
        self.limit = limit

    def wait_s(self, units: float, now_s: float, sharing: Sharing) -> float:
        """Seconds until so much may be taken; 0: now."""
        if self.limit is None:
            return 0.0
        waits_s = wait_s(self.meter, self.limit, units * sharing.factor, now_s)
        if waits_s or sharing.gateways == 1 or sharing.cut_off or not self.unheard.units:
            return waits_s
        then_left = left(self.meter, self.limit, now_s) + self.unheard.units
        share = share_of(self._own, self._everyone, sharing.gateways)
        within = self.unheard.units + units <= unheard_bound(self.limit, then_left, share)
        return 0.0 if within else 60 / self.limit

    def take(self, units: float, now_s: float, sharing: Sharing) -> Taken:
        """Take what may turn out to be more or less."""
        self.spend(units, now_s, sharing)
        return Taken(charge_of(self.meter), units, sharing.factor)

    def spend(self, units: float, now_s: float, sharing: Sharing) -> None:
        """Take it for good."""
        self.spent += units
        self.unheard.fresh += units
        if self.limit is not None:
            self.meter = take(self.meter, self.limit, units * sharing.factor, now_s)

    def correct(self, taken: Taken, used: float, now_s: float) -> None:
        """What was taken turned out to be this."""
        if self.limit is None:
            self.spent += used - taken.units
            return
        if used > taken.units:
            self.spent += used - taken.units
            self.meter = take(self.meter, self.limit, (used - taken.units) * taken.factor, now_s)
            return
        unused = (taken.units - used) * taken.factor
        back = returnable(self.meter, taken.charge, self.limit, unused, now_s)
        self.meter = give_back(self.meter, self.limit, back, now_s)
        self.spent -= back / taken.factor

    def told(self) -> None:
        """Others hear of what was taken."""
        heard = self.unheard.told()
        self._own = self._own * FORGET_PER_TELLING + heard
        self._everyone = self._everyone * FORGET_PER_TELLING + heard

    def hear(self, units: float, now_s: float) -> None:
        """Another gateway took this, or gave it back."""
        if units > 0:
            self._everyone += units
        if self.limit is None:
            return
        change = take if units > 0 else give_back
        self.meter = change(self.meter, self.limit, abs(units), now_s)

    def adopt(self, units: float, now_s: float) -> None:
        """At least this is owed, another gateway says."""
        if self.limit is not None and units > owed(self.meter, self.limit, now_s):
            self.meter = take(Meter(now_s, self.meter.given_back_s), self.limit, units, now_s)

    def owed(self, now_s: float) -> float:
        """What a minute has not paid back."""
        return owed(self.meter, self.limit, now_s) if self.limit is not None else 0.0

    def left(self, now_s: float) -> int:
        """What may be taken now."""
        return int(left(self.meter, self.limit, now_s)) if self.limit is not None else 0

    def reset_s(self, now_s: float) -> float:
        """Until all of the limit may be taken."""
        return max(0.0, self.meter.free_at_s - now_s)


class Account:
    """One key's or project's limits, and what was taken of them."""

    __slots__ = (
        "born_s",
        "changed",
        "life",
        "limits",
        "others_running",
        "requests",
        "running",
        "seen_s",
        "subject",
        "tokens",
        "unheard_running",
    )

    def __init__(self, subject: str, life: int, now_s: float) -> None:
        self.subject = subject
        self.life = life
        self.born_s = self.seen_s = now_s
        self.limits = TenantLimits()
        self.requests, self.tokens = Line(), Line()
        self.running = self.others_running = 0
        self.unheard_running = Unheard()
        self.changed = False
        """There is something to tell."""

    def set(self, limits: TenantLimits, now_s: float) -> None:
        """Hold it to these from now on."""
        self.seen_s = now_s
        if limits is not self.limits:
            self.limits = limits
            self.requests.set(limits.requests_per_minute, now_s)
            self.tokens.set(limits.tokens_per_minute, now_s)

    def has_place(self, sharing: Sharing) -> bool:
        """One more request may run."""
        limit = self.limits.concurrent_requests
        if limit is None:
            return True
        if sharing.cut_off:
            return self.running < max(1, limit // sharing.gateways)
        free = limit - self.running - self.others_running
        unheard = self.unheard_running.units
        if free <= 0 or not unheard or sharing.gateways == 1:
            return free > 0
        return unheard + 1 <= unheard_bound(limit, free + unheard, 1 / sharing.gateways)

    def total(self, now_s: float) -> LimitTotal:
        """What others are told."""
        self.unheard_running.told()
        self.requests.told()
        self.tokens.told()
        # What it has let in is known to all only at its next telling.
        self.changed = bool(self.requests.unheard.units)
        return LimitTotal(
            subject=self.subject,
            life=self.life,
            age_s=now_s - self.born_s,
            requests=self.requests.spent,
            tokens=self.tokens.spent,
            running=self.running,
            requests_owed=self.requests.owed(now_s),
            tokens_owed=self.tokens.owed(now_s),
        )

    def owes(self, now_s: float) -> bool:
        """There is something that one who missed a message has to know."""
        return bool(self.running or self.requests.owed(now_s) or self.tokens.owed(now_s))

    def idle(self, now_s: float, after_s: float) -> bool:
        """Nobody has asked for long, and nothing runs."""
        return not self.running and now_s - self.seen_s > after_s
