"""One scenario, one contender: a cluster from its first request to its last."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pilotlight.policy.coldstart.chosen import ChoiceRules
from pilotlight.policy.coldstart.servers import StartRules
from pilotlight.policy.control.plan import ControlRules
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.drain import DrainRules
from pilotlight.policy.eviction.choice import expected_policy
from pilotlight.policy.parallelism import SchemeRules
from pilotlight.policy.placement import PlacementRules
from pilotlight.policy.scaling import ScalingRules
from pilotlight.policy.turns import TurnRules
from pilotlight.sim.cluster.arrivals import requests_of
from pilotlight.sim.cluster.build import Catalogue, catalogue_of, timings_of
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.events import Events
from pilotlight.sim.cluster.evictions import Evictions
from pilotlight.sim.cluster.failures import Failures
from pilotlight.sim.cluster.leader import LONG_AGO_S, Leader
from pilotlight.sim.cluster.parts import Parts
from pilotlight.sim.cluster.results import Result, Tally
from pilotlight.sim.cluster.scenario import Contender, Scenario

TICK_S = 0.25
"""Control looks at least so often, as the service does."""
WAKE_S = 0.01
"""Control looks so long after something happened, for all that happens until then."""
MAX_STEPS = 2000
"""Of one search, as in the service."""
HOLD_DEADLINE_S = 10.0
"""Of a worker to take up its stage, as the service has it by default."""
REPEAT_S = 1.0
"""Until commands that were not obeyed are told again, as in the service."""
DRAIN_S = 600.0
"""After the last arrival requests have so long to end."""

Progress = Callable[[float], None]
"""Told the share of simulated time that has passed."""


@dataclass(slots=True, eq=False)
class Simulation:
    """One run."""

    scenario: Scenario
    contender: Contender
    seed: int
    progress: Progress = lambda _: None
    catalogue: Catalogue | None = None
    """Models in the place of those that the scenario draws; they have its applications' names."""
    asked: Iterable[Request] | None = None
    """Requests in the place of those that the scenario draws, in order of time."""
    events: Events = field(default_factory=Events)
    tally: Tally = field(init=False)
    leader: Leader = field(init=False)
    parts: Parts = field(init=False)
    failures: Failures = field(init=False)
    requests: Iterator[Request] = field(init=False)
    """Those that are still to come, in order of time."""
    _came: int = 0
    _all_came: bool = False
    _next_s: float = math.inf
    """When control looks next."""
    _looks: int = 0

    def __post_init__(self) -> None:
        catalogue = self.catalogue or catalogue_of(self.scenario)
        self.tally = Tally(self.scenario, catalogue)
        drawn = requests_of(self.scenario, self.seed) if self.asked is None else self.asked
        self.requests = iter(drawn)
        self.parts = Parts(
            scenario=self.scenario,
            contender=self.contender,
            catalogue=catalogue,
            events=self.events,
            wake=self._wake,
            first=self.tally.first,
            ended=self.tally.ended,
        )
        self.failures = Failures(
            parts=self.parts,
            duration_s=self.scenario.arrivals.duration_s,
            rng=random.Random(f"{self.scenario.name}/{self.seed}/failures"),
        )
        self.failures.plan(self.scenario.failures)
        rules = rules_of(self.scenario, self.contender)
        self.leader = Leader(
            parts=self.parts,
            rules=rules,
            models=catalogue.models,
            timings=timings_of(self.scenario, self.contender, catalogue),
            evictions=Evictions(
                self.contender.eviction, self.contender.pool_eviction, catalogue.models
            ),
        )

    def run(self) -> Result:
        """Run it."""
        began_s = time.process_time()
        self._look_at(0.0)
        self._next_request()
        end_s = self.scenario.arrivals.duration_s + DRAIN_S
        while not self._is_over() and self.events.step(end_s):
            pass
        for worker in self.parts.workers.values():
            worker.count()
        leader = self.leader
        return self.tally.result(
            policy=self.contender.name,
            requests=self._came,
            simulated_s=self.events.now_s,
            device_seconds=sum(one.device_s for one in self.parts.workers.values()),
            starts=leader.starts,
            stages=leader.stages,
            refusals=leader.refusals,
            deaths=self.failures.deaths,
            ticks=leader.ticks,
            cpu_s=time.process_time() - began_s,
        )

    def _is_over(self) -> bool:
        return self._all_came and self.tally.finished == self._came

    def _next_request(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self._all_came = True
            return

        def come() -> None:
            self._came += 1
            now_s = self.events.now_s
            self.leader.count(request.model, now_s)
            self.parts.gateway.submit(request, now_s)
            self._next_request()

        self.events.at(request.arrived_s, come)

    def _wake(self) -> None:
        if self.events.now_s + WAKE_S < self._next_s:
            self._look_at(self.events.now_s + WAKE_S)

    def _look_at(self, at_s: float) -> None:
        """Have control look at a time, and then not at the one that was planned."""
        self._next_s = at_s
        self._looks += 1
        look = self._looks

        def decide() -> None:
            if look != self._looks:
                return
            self._look_at(self.events.now_s + TICK_S)
            due_s = self.leader.decide()
            if due_s < self._next_s:
                self._look_at(due_s)
            self.progress(self.events.now_s / self.scenario.arrivals.duration_s)

        self.events.at(at_s, decide)


def rules_of(scenario: Scenario, contender: Contender) -> ControlRules:
    """Control's rules for a contender: the service's own, but that nothing is told twice where
    nothing dies, since nothing is lost then.
    """
    lossless = not scenario.failures
    choice = None
    if contender.start is not None:
        choice = ChoiceRules(
            policy=contender.start,
            start=StartRules(
                max_stages=contender.max_stages,
                proportional_shares=scenario.proportional_shares,
                streaming=False,
                least_full=1,
                max_steps=MAX_STEPS,
            ),
            bare=not contender.warm,
        )
    placement = PlacementRules(policy=expected_policy(contender.eviction))
    return ControlRules(
        reconcile=ReconcileRules(
            term_started_s=LONG_AGO_S,
            hold_deadline_s=math.inf if lossless else HOLD_DEADLINE_S,
        ),
        scaling=ScalingRules(instance_requests=scenario.max_batch),
        scheme=SchemeRules(placement=placement, choice=choice),
        drain=DrainRules(placement=placement),
        turns=TurnRules(placement=placement),
        repeat_s=math.inf if lossless else REPEAT_S,
    )
