"""Which instance takes a request: the ready one with the least expected wait; where none is ready,
one that is loading.

A request's way is a ``Route``: the instance that computes its prompt, and the one that goes on with
it. Both are the same, since instances that do one of the two alone are given nothing yet.

``Router`` adds to the view what only this gateway knows: submits that are under way or not yet
reported, workers that are full, and instances that have just refused one otherwise. A read of the
view is advice; the worker's answer to the submit decides.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pilotlight.common.clock import Clock
from pilotlight.gateway.serving.fleet import Fleet, Seen
from pilotlight.gateway.serving.full_workers import FullWorkers
from pilotlight.policy.cluster import HeldState, Liveness, WorkerFacts
from pilotlight.policy.ids import InstanceId, ModelName
from pilotlight.policy.plan import Instance, InstanceRole

MAX_UNCONFIRMED = 128
"""Submits to one instance that may be without an answer: more would only pile up in front of its
queue. With a quarter of that, a gateway that is busy bounds itself: answers of submits wait there
for their turn, too, and what is held meanwhile costs it more."""
UNREPORTED_FOR_S = 0.5
"""After so long an accepted request shows in its worker's reports."""
STEP_FLOOR_S = 0.001
_UNUSABLE = frozenset({HeldState.DRAINING, HeldState.FAILED, HeldState.EVICTED})


@dataclass(slots=True)
class _Load:
    unconfirmed: int = 0
    accepted_at_s: deque[float] = field(default_factory=deque[float])
    """Of late, the oldest first."""
    avoid_until_s: float = 0.0
    handed_tokens: int = 0
    """Of the requests that it was given while it loads."""


@dataclass(slots=True)
class Siblings:
    """Requests with one prompt: they go to one instance where they can, which then has the prompt's
    KV for all of them.
    """

    instance_id: InstanceId | None = None
    """Where the last of them went."""


@dataclass(frozen=True, slots=True)
class Route:
    """A request's way through the fleet."""

    prefill: Seen
    """It is handed the request, and computes the prompt."""
    decode: Seen
    """It gives the tokens: what comes of the request is heard from it, and said to it."""

    @property
    def instance(self) -> Instance:
        """The one that is handed the request: its wait and its readiness count."""
        return self.prefill.instance

    @property
    def serving(self) -> bool:
        """Whether the instance that is handed the request was seen serving; otherwise it loads."""
        return self.prefill.serving


def expected_wait_s(facts: WorkerFacts, unreported_requests: int, needed_tokens: int) -> float:
    """Time until a new request's first token can be worked on.

    1. Each request in line, here and there, costs a step.
    2. Too little KV room: it waits until another request ends, taken as one step for each token
       that is missing.
    """
    step_s = max(facts.step_time_s, STEP_FLOOR_S)
    in_line = facts.queue_requests + facts.running_requests + unreported_requests
    missing_tokens = max(0, needed_tokens - facts.kv_free_tokens)
    return step_s * (in_line + missing_tokens)


class Router:
    """Picks instances and remembers what it has sent them."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._loads: dict[InstanceId, _Load] = {}
        self.full = FullWorkers(clock)
        fleet.on_gone(self._forget)
        fleet.on_lost(lambda worker_id, _: self.full.forget(worker_id))

    def __len__(self) -> int:
        """Instances of which something is remembered."""
        return len(self._loads)

    def pick(
        self, model: ModelName, needed_tokens: int, siblings: Siblings | None = None
    ) -> Route | None:
        """The way by the instance that may take one more request now: that of its siblings, or the
        one with the least expected wait.

        None when there is none.
        """
        return self._least(self._fleet.serving(model), needed_tokens, siblings)

    def pick_open(
        self, model: ModelName, held_tokens: int, siblings: Siblings | None = None
    ) -> Route | None:
        """The same among those that are loading, for a model that is ready nowhere.

        Each takes as many requests as its KV has room for, by what they need for their first
        tokens; one in any case. The others had better wait: another instance may be ready first.
        """
        if self._fleet.serving(model):
            return None
        return self._least(
            [seen for seen in self._fleet.open(model) if self._has_room(seen, held_tokens)],
            held_tokens,
            siblings,
        )

    def is_warm(self, model: ModelName) -> bool:
        """Whether any instance of a model is ready."""
        return bool(self._fleet.serving(model))

    def is_ready(self, instance_id: InstanceId) -> bool:
        """Whether an instance has finished loading."""
        return self._fleet.serves(instance_id)

    def handed(self, instance_id: InstanceId, tokens: int) -> None:
        """A request of ``tokens`` was given to an instance that is loading; negative: it is there
        no longer.
        """
        if tokens > 0 or instance_id in self._loads:
            self._loads.setdefault(instance_id, _Load()).handed_tokens += tokens

    def _has_room(self, seen: Seen, held_tokens: int) -> bool:
        load = self._loads.get(seen.instance.instance_id, _Load())
        room_tokens = self._fleet.kv_capacity_tokens(seen.instance)
        return load.handed_tokens == 0 or load.handed_tokens + held_tokens <= room_tokens

    def _least(
        self, seen_ones: Iterable[Seen], needed_tokens: int, siblings: Siblings | None
    ) -> Route | None:
        best: tuple[float, InstanceId, Seen] | None = None
        for seen in seen_ones:
            wait_s = self._wait_s(seen, needed_tokens)
            if wait_s is None:
                continue
            if siblings is not None and seen.instance.instance_id == siblings.instance_id:
                return Route(seen, seen)
            candidate = (wait_s, seen.instance.instance_id, seen)
            if best is None or candidate[:2] < best[:2]:
                best = candidate
        return Route(best[2], best[2]) if best is not None else None

    def sent(self, instance: Instance) -> None:
        """A submit is under way."""
        load = self._loads.get(instance.instance_id)
        if load is None:
            load = self._loads[instance.instance_id] = _Load()
        load.unconfirmed += 1
        self.full.sent(instance.lead)

    def answered(self, instance: Instance, *, accepted: bool) -> None:
        """A submit is no longer under way."""
        instance_id = instance.instance_id
        load = self._loads.get(instance_id)
        if load is None:
            load = self._loads[instance_id] = _Load()
        load.unconfirmed -= 1
        if accepted:
            load.accepted_at_s.append(self._clock.monotonic_s())
            self.full.accepted(instance.lead)
        if not self._fleet.knows(instance_id):
            self._forget(instance_id)

    def unused(self, instance: Instance) -> None:
        """A submit that was to be under way is not made."""
        self.answered(instance, accepted=False)
        self.full.freed(instance.lead)

    def avoid(self, instance_id: InstanceId, for_s: float) -> None:
        """Send an instance nothing for a while."""
        if self._fleet.knows(instance_id):
            load = self._loads.setdefault(instance_id, _Load())
            load.avoid_until_s = max(load.avoid_until_s, self._clock.monotonic_s() + for_s)

    def _forget(self, instance_id: InstanceId) -> None:
        """The instance is gone; a submit that is under way is still to be answered."""
        load = self._loads.get(instance_id)
        if load is not None and load.unconfirmed == 0:
            del self._loads[instance_id]

    def _wait_s(self, seen: Seen, needed_tokens: int) -> float | None:
        instance = seen.instance
        if instance.role is not InstanceRole.BOTH:
            return None
        facts = self._fleet.worker(instance.lead)
        if facts is None or facts.liveness is not Liveness.ALIVE or not facts.engine_up:
            return None
        instance_id = instance.instance_id
        for held in facts.held:
            if held.instance_id == instance_id and held.state in _UNUSABLE:
                return None
        load = self._loads.get(instance_id) or _Load()
        now_s = self._clock.monotonic_s()
        if load.unconfirmed >= MAX_UNCONFIRMED or now_s < load.avoid_until_s:
            return None
        if not self.full.may_take(instance.lead, instance.model):
            return None
        accepted_at_s = load.accepted_at_s
        while accepted_at_s and now_s - accepted_at_s[0] >= UNREPORTED_FOR_S:
            accepted_at_s.popleft()
        return expected_wait_s(facts, load.unconfirmed + len(accepted_at_s), needed_tokens)
