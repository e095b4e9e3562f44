"""The scheduler's figures for Prometheus."""

from collections import Counter as Tally
from collections.abc import Collection
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotlight.policy.control.focus import Visited
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.scheduler.records import ColdStart

_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_CONTROL_BUCKETS_S = tuple(
    one * 1e-3 for one in (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 100, 300, 1000)
)
"""Up to the time between two turns, and beyond."""


class SchedulerMetrics:
    """Counters and gauges of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._leader = Gauge(
            "pilotlight_scheduler_leader", "1 while this process leads", registry=registry
        )
        self._epoch = Gauge(
            "pilotlight_scheduler_epoch",
            "Epoch of the running term, 0 while another leads",
            registry=registry,
        )
        self._instances = Gauge(
            "pilotlight_instances", "Instances by state", ["state"], registry=registry
        )
        self._promised = Gauge(
            "pilotlight_promised_instances",
            "Instances that groups are to become, beside themselves",
            registry=registry,
        )
        self._longest_wait = Gauge(
            "pilotlight_longest_wait_seconds",
            "Age of the oldest waiting request for a model that no instance serves or loads",
            registry=registry,
        )
        self._visited = Counter(
            "pilotlight_control_visited",
            "Objects that control looked at, by kind",
            ["kind"],
            registry=registry,
        )
        self._control = Histogram(
            "pilotlight_control_seconds",
            "What a turn of the leader takes: deciding (tick) and all of it, with rows and commands (turn)",
            ["step"],
            registry=registry,
            buckets=_CONTROL_BUCKETS_S,
        )
        self._takeover = Gauge(
            "pilotlight_scheduler_takeover_seconds",
            "From this process's last lease to steps of its term: rows read, term announced, commands sent to all",
            ["step"],
            registry=registry,
        )
        self._decisions = Counter(
            "pilotlight_decisions", "Recorded decisions", ["kind", "outcome"], registry=registry
        )
        self._cold_starts = Counter(
            "pilotlight_cold_starts", "Finished cold starts", ["status"], registry=registry
        )
        self._ttft = Histogram(
            "pilotlight_cold_ttft_seconds",
            "Arrival to first token of cold starts",
            registry=registry,
            buckets=_BUCKETS_S,
        )
        self._coverage = Gauge(
            "pilotlight_cold_start_coverage",
            "Phase coverage of the last finished cold start",
            registry=registry,
        )

    def leading(self, epoch: int) -> None:
        """A term began, or ended (0)."""
        self._leader.set(1 if epoch else 0)
        self._epoch.set(epoch)
        if not epoch:
            self._longest_wait.set(0)

    def instances(self, instances: Collection[Instance]) -> None:
        """How many there are in each state, and are still to come of groups."""
        tally = Tally(instance.state for instance in instances)
        for state in InstanceState:
            self._instances.labels(state=state.value).set(tally[state])
        living = SERVING | STARTING
        self._promised.set(sum(one.targets - 1 for one in instances if one.state in living))

    def waited(self, longest_s: float) -> None:
        """How long the oldest request has waited for a model that is served nowhere."""
        self._longest_wait.set(longest_s)

    def turned(self, tick_s: float, turn_s: float) -> None:
        """A turn has ended: what its tick took, and all of it."""
        self._control.labels(step="tick").observe(tick_s)
        self._control.labels(step="turn").observe(turn_s)

    def taken_over(self, step: str, after_s: float) -> None:
        """A new term has come so far, so long after its lease was taken; rows come first."""
        if step == "rows":
            self._takeover.clear()
        self._takeover.labels(step=step).set(after_s)

    def looked_at(self, visited: Visited) -> None:
        """A tick has looked at objects."""
        for kind, count in asdict(visited).items():
            self._visited.labels(kind=kind).inc(count)

    def decided(self, kind: str, outcome: str) -> None:
        """A decision was recorded."""
        self._decisions.labels(kind=kind, outcome=outcome).inc()

    def cold_start_finished(self, record: ColdStart) -> None:
        """A cold start was closed."""
        self._cold_starts.labels(status=record.status).inc()
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)

    def cold_start_explained(self, record: ColdStart) -> None:
        """All phases of a closed cold start are there."""
        if record.coverage is not None:
            self._coverage.set(record.coverage)
