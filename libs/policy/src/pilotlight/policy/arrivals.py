"""How often each model is asked for: what a gateway counts, and what its listeners make of it.

::

    gateway                        v1.arrivals.<gateway>                scheduler, cache
    ArrivalCounters ── totals of models that changed, some others ──> ArrivalWindows ──> RecentArrivals

A gateway tells totals, not differences: a lost message, a repeated one and one that comes late
change nothing once a later one is there. Totals belong to one *life* of a gateway's counters, in
which they never fall; a gateway that starts anew begins another life at zero.

The rate of a model is the request rate over a sliding window of mCache, section 4.3.2.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pilotlight.policy.ids import GatewayId, ModelName
from pilotlight.policy.liveness import FORGET_AFTER_S

SLOT_S = 10.0
"""Arrivals are kept in slots of this length."""
WINDOW_SLOTS = 30
WINDOW_S = SLOT_S * WINDOW_SLOTS
"""The window that rates are taken over: the current slot and the whole ones before it."""
MAX_MODELS = 65_536
"""Models that a gateway counts, and a listener remembers."""
MAX_LIVES = 4096
"""Lives of gateways that a listener remembers."""
GATHER_S = 0.1
"""The shortest time between two messages of a gateway: what changes meanwhile travels together."""
MAX_TOLD = 2_000
"""Models in one message: 400 KB at most, and a few milliseconds of its listener's time."""
REPEATED = 500
"""Of these, models whose total has not changed: whatever was lost is told again, in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalCount:
    """Requests for one model at one gateway, whatever became of them."""

    model: ModelName
    total: int
    """In this life of the gateway's counters."""
    idle_s: float
    """Since the last of them: an age, because gateway and listener may be on two hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterLife:
    """One life of a gateway's counters."""

    gateway_id: GatewayId
    number: str
    """Tells it apart from the gateway's other lives."""
    age_s: float
    """Since its totals were zero."""


class ArrivalCounters:
    """A gateway's side: counts, and says what is to be told next."""

    def __init__(self, now_s: float, max_models: int = MAX_MODELS) -> None:
        self.life = 1
        """Counts the times that counting began at zero."""
        self._began_s = now_s
        self._max_models = max_models
        self._known: OrderedDict[ModelName, tuple[int, float]] = OrderedDict()
        """Total and time of the last arrival; the model that was told the longest ago is first."""
        self._changed: dict[ModelName, None] = {}

    @property
    def models(self) -> int:
        """Models that have been counted in this life."""
        return len(self._known)

    @property
    def changed(self) -> bool:
        """Whether there are arrivals that have not been told."""
        return bool(self._changed)

    def age_s(self, now_s: float) -> float:
        """How long this life has lasted."""
        return now_s - self._began_s

    def count(self, model: ModelName, now_s: float) -> None:
        """Count one arrival. A model too many begins a new life, without the models of the old."""
        if model not in self._known and len(self._known) >= self._max_models:
            self._known.clear()
            self._changed.clear()
            self._began_s = now_s
            self.life += 1
        total, _ = self._known.get(model, (0, now_s))
        self._known[model] = (total + 1, now_s)
        self._changed[model] = None

    def tell(
        self, now_s: float, limit: int = MAX_TOLD, repeated: int = REPEATED
    ) -> tuple[ArrivalCount, ...]:
        """What the next message says; it is then taken for told.

        1. models whose totals have changed, the first that changed first, ``limit`` at most
        2. within the limit, ``repeated`` others, those that were told the longest ago
        """
        told = dict.fromkeys(list(self._changed)[:limit])  # 1
        for model in told:
            del self._changed[model]
            self._known.move_to_end(model)
        others = min(repeated, limit - len(told), len(self._known) - len(told))
        for _ in range(others):  # 2
            model = next(iter(self._known))
            self._known.move_to_end(model)
            self._changed.pop(model, None)
            told[model] = None
        counts: list[ArrivalCount] = []
        for model in told:
            total, last_s = self._known[model]
            counts.append(ArrivalCount(model=model, total=total, idle_s=max(0.0, now_s - last_s)))
        return tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Arrivals of one model that a message has brought."""

    model: ModelName
    count: int
    at_s: float
    """When the last of them arrived, on the listener's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArrivals:
    """When one model was asked for lately, at all gateways."""

    last_s: float
    """When it was asked for last; this alone is known of the time before the listener began."""
    slots: tuple[tuple[int, int], ...] = ()
    """Numbers of slots and arrivals in them, the latest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentArrivals:
    """Arrivals by model as one listener knows them at one moment. Nothing is written to it."""

    since_s: float = 0.0
    """When the listener began: arrivals before that are not counted."""
    models: Mapping[ModelName, ModelArrivals] = field(
        default_factory=dict[ModelName, ModelArrivals]
    )

    def last_s(self, model: ModelName) -> float | None:
        """When a model was asked for last; None when that is not known."""
        known = self.models.get(model)
        return None if known is None else known.last_s

    def count(self, model: ModelName, now_s: float) -> int:
        """Arrivals of a model within the window."""
        known = self.models.get(model)
        if known is None:
            return 0
        oldest = _slot(now_s) - WINDOW_SLOTS
        return sum(count for slot, count in known.slots if slot > oldest)

    def rate_per_s(self, model: ModelName, now_s: float) -> float:
        """Arrivals of a model a second, over that part of the window that was listened to."""
        began_s = max(self.since_s, (_slot(now_s) - WINDOW_SLOTS + 1) * SLOT_S)
        return self.count(model, now_s) / max(SLOT_S, now_s - began_s)

    def burst_per_s(self, model: ModelName, now_s: float) -> float:
        """Arrivals of a model a second over the newest slot and the one before it: 10 to 20 s."""
        known, slot = self.models.get(model), _slot(now_s)
        if known is None:
            return 0.0
        newest = sum(count for at, count in known.slots if at >= slot - 1)
        began_s = max(self.since_s, (slot - 1) * SLOT_S)
        return newest / max(SLOT_S, now_s - began_s)

    def of(self, models: Collection[ModelName]) -> "RecentArrivals":
        """The same without the models that are not named."""
        named = {model: self.models[model] for model in models if model in self.models}
        return RecentArrivals(since_s=self.since_s, models=named)


NO_ARRIVALS = RecentArrivals()


@dataclass(slots=True)
class _Life:
    """What a listener has heard of one life."""

    whole: bool
    """The listener has listened since the life began: every arrival is new to it."""
    heard_s: float
    totals: dict[ModelName, int] = field(default_factory=dict[ModelName, int])


class ArrivalWindows:
    """A listener's side: totals of several gateways become arrivals over a window.

    1. A total counts as far as it is above the highest that was heard in its life.
    2. In a life that began while this listener listened, the first total of a model is all new. In
       an older one it says how much came before: of that, the last arrival alone is counted, and
       only if it came while this listener listened.
    3. Arrivals that one message brings are taken to have come when the last of them did: the others
       came earlier by the time between two messages at most.
    4. A life that was silent for 60 s is forgotten. From then on a life that is not known and that
       began before counts as an older one (2): it may be the one that was forgotten.
    """

    def __init__(self, since_s: float) -> None:
        """``since_s``: when listening began, on the listener's monotonic clock."""
        self._since_s = since_s
        self._whole_since_s = since_s
        self._lives: OrderedDict[tuple[GatewayId, str], _Life] = OrderedDict()
        self._models: dict[ModelName, ModelArrivals] = {}
        """The model that was asked for the longest ago is first, but for what came late."""
        self._recent: RecentArrivals | None = None

    @property
    def gateways(self) -> int:
        """Gateways that are heard."""
        return len({gateway_id for gateway_id, _ in self._lives})

    @property
    def models(self) -> int:
        """Models of which it is known when they were asked for last."""
        return len(self._models)

    def hear(
        self, life: CounterLife, counts: Iterable[ArrivalCount], now_s: float, listened_s: float
    ) -> tuple[Access, ...]:
        """Take a message.

        Args:
            life: Which counters its totals belong to.
            counts: Totals of some models.
            now_s: On the listener's monotonic clock.
            listened_s: On a clock that stands still while nothing can be heard (``Roster``):
                silence counts by it.

        Returns:
            What is new, each model once.
        """
        known = self._life(life, now_s, listened_s)
        accesses: list[Access] = []
        for count in counts:
            at_s = now_s - max(0.0, count.idle_s)
            before = known.totals.get(count.model)
            if before is None and not known.whole:  # 2
                new = 1 if count.total > 0 and at_s >= self._whole_since_s else 0
            else:
                new = count.total - (before or 0)  # 1
            if before is None or count.total > before:
                known.totals[count.model] = count.total
                self._note(count.model, max(0, new), at_s)
            if new > 0:
                accesses.append(Access(model=count.model, count=new, at_s=at_s))
        return tuple(accesses)

    def recent(self) -> RecentArrivals:
        """What is known now; it stays as it is when more is heard."""
        if self._recent is None:
            self._recent = RecentArrivals(since_s=self._since_s, models=dict(self._models))
        return self._recent

    def _life(self, life: CounterLife, now_s: float, listened_s: float) -> _Life:
        key = (life.gateway_id, life.number)
        known = self._lives.get(key)
        if known is None:
            whole = now_s - life.age_s >= self._whole_since_s
            known = self._lives[key] = _Life(whole=whole, heard_s=listened_s)
        known.heard_s = listened_s
        self._lives.move_to_end(key)
        while len(self._lives) > 1:  # 4
            silent = next(iter(self._lives))
            if (
                len(self._lives) <= MAX_LIVES
                and listened_s - self._lives[silent].heard_s < FORGET_AFTER_S
            ):
                break
            del self._lives[silent]
            self._whole_since_s = now_s
        return known

    def _note(self, model: ModelName, count: int, at_s: float) -> None:
        known = self._models.pop(model, None)
        last_s = at_s if known is None else max(known.last_s, at_s)
        slots = () if known is None else known.slots
        if count:
            slots = _with(slots, _slot(at_s), count)
        self._models[model] = ModelArrivals(last_s=last_s, slots=slots)
        if len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        self._recent = None


def _with(slots: tuple[tuple[int, int], ...], slot: int, count: int) -> tuple[tuple[int, int], ...]:
    """Slots with more arrivals in one of them, without those that are out of the window by then."""
    latest = slots[-1] if slots else (slot, 0)
    if latest[0] == slot:
        kept = slots[:-1]
        count += latest[1]
    elif latest[0] < slot:
        kept = slots
    else:  # It came late, out of turn.
        sums = dict(slots)
        sums[slot] = sums.get(slot, 0) + count
        return tuple(sorted(sums.items()))
    while kept and kept[0][0] <= slot - WINDOW_SLOTS:
        kept = kept[1:]
    return (*kept, (slot, count))


def _slot(at_s: float) -> int:
    return math.floor(at_s / SLOT_S)
