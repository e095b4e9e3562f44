"""Finds models that are evicted and loaded again in turn: more are asked for than there is room."""

from collections import OrderedDict, deque
from dataclasses import dataclass

from pilotlight.policy.arrivals import MAX_MODELS
from pilotlight.policy.ids import ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrashRules:
    """When loads in turn are worth a word."""

    soon_s: float = 300.0
    """A load so soon after the eviction of the same model is a reload."""
    window_s: float = 600.0
    reloads: int = 6
    """Within the window: one each hundred seconds."""
    again_s: float = 600.0
    """No second word within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thrash:
    """Models that take each other's places."""

    models: tuple[ModelName, ...]
    """The one that was loaded again most often first."""
    reloads_per_hour: float
    missing_bytes: int
    """How much more device memory would hold those that had gone."""

    @property
    def advice(self) -> str:
        """What an operator can do."""
        return (
            f"{len(self.models)} models take turns, {self.reloads_per_hour:.0f} reloads an hour. Any of these ends it: "
            f"{self.missing_bytes / 2**30:.2f} GiB more device memory, fewer of these models on it, or a pin on "
            "those that must not wait. PILOTLIGHT_MIN_SERVICE_LOADS makes each turn longer and rarer."
        )


class ThrashWatch:
    """Told of evictions from devices, and of loads onto them. One owner."""

    def __init__(self, rules: ThrashRules | None = None) -> None:
        """``rules``: figures."""
        self._rules = ThrashRules() if rules is None else rules
        self._gone: OrderedDict[ModelName, tuple[float, int]] = OrderedDict()
        """When each was evicted last, and its size."""
        self._reloads: deque[tuple[float, ModelName, int]] = deque()
        self._told_s = float("-inf")

    def evicted(self, model: ModelName, size_bytes: int, now_s: float) -> None:
        """A model left a device for another one."""
        self._gone.pop(model, None)
        self._gone[model] = (now_s, size_bytes)
        if len(self._gone) > MAX_MODELS:
            self._gone.popitem(last=False)

    def loaded(self, model: ModelName, now_s: float) -> Thrash | None:
        """A model is loaded; what is wrong if it is one reload too many."""
        gone_s, size_bytes = self._gone.pop(model, (float("-inf"), 0))
        if now_s - gone_s > self._rules.soon_s:
            return None
        self._reloads.append((now_s, model, size_bytes))
        while self._reloads[0][0] < now_s - self._rules.window_s:
            self._reloads.popleft()
        few = len(self._reloads) < self._rules.reloads
        if few or now_s - self._told_s < self._rules.again_s:
            return None
        self._told_s = now_s
        counts: dict[ModelName, int] = {}
        for _, name, _ in self._reloads:
            counts[name] = counts.get(name, 0) + 1
        return Thrash(
            models=tuple(sorted(counts, key=lambda name: (-counts[name], name))),
            reloads_per_hour=len(self._reloads) * 3600.0 / self._rules.window_s,
            missing_bytes=max(size_bytes, self._gone_bytes(now_s)),
        )

    def _gone_bytes(self, now_s: float) -> int:
        """Of models that were evicted lately and are not back."""
        recent = (size for at_s, size in self._gone.values() if now_s - at_s <= self._rules.soon_s)
        return sum(recent)
