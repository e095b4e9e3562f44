"""Bounded waits, and service for most of the time, in a small simulation of turns."""

import math
from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.scaling import ScalingRules, plan_scaling
from pilotlight.policy.testing import NOW_S, ROOM_BYTES, demand, instance, model, world
from pilotlight.policy.turns import TurnRules, plan_turns

S = InstanceState
RULES = TurnRules()
PATIENCE_S = RULES.patience_s(model())
TICK_S = 0.5


@dataclass
class Shop:
    """Closed-loop clients of more models than there are places, in steps of a tick; the policies
    decide, the rest is clockwork.
    """

    models: int
    places: int
    request_s: float
    load_s: float
    clients: int = 2
    now_s: float = NOW_S
    registered: dict[ModelName, Model] = field(default_factory=dict[ModelName, Model])
    instances: dict[str, Instance] = field(default_factory=dict[str, Instance])
    ready_at_s: dict[str, float] = field(default_factory=dict[str, float])
    running: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By instance, the ends of its requests."""
    waiting: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By model, the arrivals of those that wait."""
    longest_s: float = 0.0
    loads: int = 0
    lives_s: list[float] = field(default_factory=list[float])

    def run(self, for_s: float) -> None:
        self.registered = {
            one.name: one for one in (model(f"m{index:02}") for index in range(self.models))
        }
        self.waiting = {name: [self.now_s] * self.clients for name in self.registered}
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self._step()
            self.now_s += TICK_S
        left = [arrived_s for arrivals in self.waiting.values() for arrived_s in arrivals]
        self.longest_s = max(self.longest_s, self.now_s - min(left, default=self.now_s))

    def _snapshot(self) -> Snapshot:
        waiting = tuple(
            replace(demand(name, len(arrivals)), oldest_age_s=self.now_s - min(arrivals))
            for name, arrivals in self.waiting.items()
            if arrivals
        )
        snapshot = world(
            *self.instances.values(),
            waiting=waiting,
            places=self.places,
            models=tuple(self.registered.values()),
        )
        return replace(snapshot, now_s=self.now_s, models=tuple(self.registered.values()))

    def _step(self) -> None:
        for instance_id, one in list(self.instances.items()):
            self._serve(instance_id, one)
        snapshot = self._snapshot()
        scale = plan_scaling(snapshot, ScalingRules())
        turns = plan_turns(snapshot, (start.model for start in scale.starts), RULES)
        for drain in (*scale.drains, *turns.drains):
            one = self.instances[drain.instance_id]
            self.lives_s.append(self.now_s - one.state_since_s)
            self.instances[drain.instance_id] = replace(
                one, state=S.DRAINING, state_since_s=self.now_s, drain_within_s=drain.within_s
            )
        for turn in turns.turns:
            self._start(turn.model, turn.left)

    def _start(self, name: ModelName, left: frozenset[WorkerId]) -> None:
        snapshot = self._snapshot()
        choice = choose_scheme(
            self.registered[name], snapshot, SchemeRules(placement=RULES.placement), left
        )
        if choice.scheme is None:
            return
        on = choice.scheme.placements[0].worker_id
        for evicted in [
            key for key, one in self.instances.items() if one.lead == on and one.state is S.READY
        ]:
            self.lives_s.append(self.now_s - self.instances[evicted].state_since_s)
            del self.instances[evicted]
        self.loads += 1
        one = instance(
            name,
            f"{name}-{self.loads}",
            state=S.LOADING,
            worker_id=on,
            since_s=self.now_s,
            used_s=self.now_s,
            device_bytes=ROOM_BYTES,
        )
        self.instances[one.instance_id] = one
        self.ready_at_s[one.instance_id] = self.now_s + self.load_s
        self.running[one.instance_id] = []

    def _serve(self, instance_id: str, one: Instance) -> None:
        running = self.running[instance_id]
        overdue = (
            one.drain_within_s is not None and self.now_s - one.state_since_s >= one.drain_within_s
        )
        ended = [end_s for end_s in running if end_s <= self.now_s or overdue]
        self.running[instance_id] = running = [end_s for end_s in running if end_s not in ended]
        arrivals = self.waiting[one.model]
        arrivals += [self.now_s] * len(ended)
        if one.state is S.DRAINING:
            if not running:
                del self.instances[instance_id]
            else:
                self.instances[instance_id] = replace(one, in_flight=len(running))
            return
        if one.state is S.LOADING:
            if self.now_s < self.ready_at_s[instance_id]:
                self.instances[instance_id] = replace(one, last_used_s=self.now_s)
                return
            one = replace(
                one,
                state=S.READY,
                load_s=self.now_s - one.state_since_s,
                state_since_s=self.now_s,
                served=True,
            )
        for number, arrived_s in enumerate(arrivals):
            self.longest_s = max(self.longest_s, self.now_s - arrived_s)
            # Staggered, so that an instance is never idle by chance.
            running.append(self.now_s + self.request_s * (1 + number / 2))
        arrivals.clear()
        self.instances[instance_id] = replace(one, in_flight=len(running), last_used_s=self.now_s)


@settings(max_examples=6, deadline=None)
@example(models=4, places=3, request_s=1.5, load_s=1.0)
@example(models=20, places=3, request_s=1000.0, load_s=1.0)
@given(
    models=st.integers(2, 20),
    places=st.integers(1, 4),
    request_s=st.sampled_from([0.5, 1.5, 1000.0]),
    load_s=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_waits_are_bounded_and_most_of_the_time_is_service(
    models: int, places: int, request_s: float, load_s: float
) -> None:
    """Each place turns over at least once in (service owed + drain + load), and the line is first
    come, first served.
    """
    shop = Shop(models=models, places=places, request_s=request_s, load_s=load_s)
    shop.run(60.0)
    slack_s = 4 * TICK_S
    owed_s = RULES.placement.service.min_loads * (load_s + TICK_S)
    turn_s = owed_s + max(PATIENCE_S, load_s) + load_s + slack_s
    rounds = math.ceil(max(0, models - places) / places)
    assert shop.longest_s <= PATIENCE_S + load_s + slack_s + rounds * turn_s
    if models <= places:
        assert shop.loads == models
        assert shop.lives_s == []
    assert all(life_s >= RULES.placement.service.min_loads * load_s for life_s in shop.lives_s)
