"""What a worker process counts."""

from collections import Counter as Counts
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from pilotlight.common.messages.engine import StepDone
from pilotlight.common.tallies import HistogramTally, Tally
from pilotlight.policy.cluster import HealthState
from pilotlight.policy.request import FinishReason

STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0)


class LendingMetrics:
    """KV beyond grants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._granted = Gauge(
            "pilotlight_worker_granted_bytes",
            "Device memory that stages were granted: parameters and KV.",
            registry=registry,
        )
        self._lent = Gauge(
            "pilotlight_worker_kv_lent_bytes",
            "Device memory that stages have for KV beyond their grants.",
            registry=registry,
        )
        self.refused = Counter(
            "pilotlight_worker_kv_resizes_refused",
            "Resizes of KV that an engine refused.",
            registry=registry,
        )
        self._resize_s = Histogram(
            "pilotlight_worker_kv_resize_seconds",
            "How long a resize of KV takes, from asking the engine to its answer.",
            ["direction"],
            buckets=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0),
            registry=registry,
        )

    def resized(self, *, grew: bool, seconds: float) -> None:
        """Count one resize."""
        self._resize_s.labels(direction="grow" if grew else "shrink").observe(seconds)

    def lent(self, granted_bytes: int, lent_bytes: int) -> None:
        """What the stages of a worker have."""
        self._granted.set(granted_bytes)
        self._lent.set(lent_bytes)


class WorkerMetrics:
    """Metrics of one worker process; simulated workers share them, so that there are as many series
    however many they are.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(_BeforeOthers(self))
        self._last: StepDone | None = None
        """The last step, until it is shown."""
        self._batch_tokens = self._looked_up_tokens = self._hit_tokens = self._preemptions = 0
        """Sums over the steps that are not shown yet."""
        self._tokens = 0
        """Output tokens that are not shown yet."""
        self._finished = Counts[FinishReason]()
        """Requests that ended and are not shown yet."""
        self.accepted = Tally(
            "pilotlight_worker_requests_accepted", "Requests that were accepted.", (), registry
        )
        self.refused = Counter(
            "pilotlight_worker_requests_refused",
            "Requests that were refused.",
            ["code"],
            registry=registry,
        )
        self.finished = Counter(
            "pilotlight_worker_requests_finished",
            "Requests that ended.",
            ["finish"],
            registry=registry,
        )
        self.tokens = Counter(
            "pilotlight_worker_tokens", "Output tokens that engines made.", registry=registry
        )
        self.resends = Counter(
            "pilotlight_worker_resends", "Resends that gateways asked for.", registry=registry
        )
        self.loads = Counter(
            "pilotlight_worker_loads",
            "Stage loads, by how they ended.",
            ["outcome"],
            registry=registry,
        )
        self.restores = Counter(
            "pilotlight_worker_restores",
            "Starts by what became of their artifact; of refused ones the field that is wrong.",
            ["outcome", "field"],
            registry=registry,
        )
        self.builds = Counter(
            "pilotlight_worker_builds",
            "Builds of artifacts, by how they ended.",
            ["outcome"],
            registry=registry,
        )
        self.stale = Counter(
            "pilotlight_worker_stale_commands",
            "Commands refused for their epoch.",
            registry=registry,
        )
        self.given_up = Counter(
            "pilotlight_worker_stages_given_up", "Stages unloaded for the cache.", registry=registry
        )
        self.engine_deaths = Counter(
            "pilotlight_worker_engine_deaths", "Engines that ended unexpectedly.", registry=registry
        )
        self.engine_hangs = Counter(
            "pilotlight_worker_engine_hangs",
            "Of these, engines that hung and were ended for it.",
            registry=registry,
        )
        self.lending = LendingMetrics(registry)
        self.device = Gauge(
            "pilotlight_worker_device_health",
            "1 for the state that the worker's device is in, else 0.",
            ["state"],
            registry=registry,
        )
        self.running = Gauge(
            "pilotlight_worker_requests_running",
            "Requests that engines have not ended.",
            registry=registry,
        )
        self.queued = Gauge(
            "pilotlight_worker_requests_queued",
            "Of these, requests that own no KV blocks.",
            registry=registry,
        )
        self.kv_used = Gauge(
            "pilotlight_worker_kv_used_tokens",
            "KV room in blocks that requests own.",
            registry=registry,
        )
        self.kv_cached = Gauge(
            "pilotlight_worker_kv_cached_tokens",
            "Of the free KV room, what holds prefixes.",
            registry=registry,
        )
        self.kv_free = Gauge(
            "pilotlight_worker_kv_free_tokens", "KV room that no request owns.", registry=registry
        )
        self.batch_tokens = Counter(
            "pilotlight_worker_batch_tokens",
            "Tokens of prompts and outputs that engines ran.",
            registry=registry,
        )
        self.prefix_looked_up = Counter(
            "pilotlight_worker_prefix_looked_up_tokens",
            "Tokens that were looked up in prefix caches.",
            registry=registry,
        )
        self.prefix_hits = Counter(
            "pilotlight_worker_prefix_hit_tokens",
            "Tokens that were found in prefix caches.",
            registry=registry,
        )
        self.preemptions = Counter(
            "pilotlight_worker_preemptions",
            "Times that a request gave up its KV blocks to an older one.",
            registry=registry,
        )
        self._step_s = HistogramTally(
            "pilotlight_worker_step_seconds",
            "How long an engine step takes.",
            (),
            STEP_BUCKETS_S,
            registry,
        ).series()

    def stepped(self, *steps: StepDone) -> None:
        """Count engine steps, in order.

        What is asked for once in seconds is not told to the registry with every step.
        """
        self._step_s.observe(*[step.step_time_s for step in steps])
        self._batch_tokens += sum([step.batch_tokens for step in steps])
        self._looked_up_tokens += sum([step.prefix_looked_up_tokens for step in steps])
        self._hit_tokens += sum([step.prefix_hit_tokens for step in steps])
        self._preemptions += sum([step.preemptions for step in steps])
        self._last = steps[-1]

    def gave(self, tokens: int) -> None:
        """Count output tokens."""
        self._tokens += tokens

    def ended(self, finish: FinishReason) -> None:
        """Count a request that ended."""
        self._finished[finish] += 1

    def show_steps(self) -> None:
        """Tell the registry of the steps, tokens and ends that it has not been told of."""
        self.tokens.inc(self._tokens)
        self._tokens = 0
        for finish, count in self._finished.items():
            self.finished.labels(finish=finish.value).inc(count)
        self._finished.clear()
        step, self._last = self._last, None
        if step is None:
            return
        self.queued.set(step.waiting)
        self.kv_used.set(step.kv_used_tokens)
        self.kv_free.set(step.kv_free_tokens)
        self.kv_cached.set(step.kv_cached_tokens)
        self.batch_tokens.inc(self._batch_tokens)
        self.prefix_looked_up.inc(self._looked_up_tokens)
        self.prefix_hits.inc(self._hit_tokens)
        self.preemptions.inc(self._preemptions)
        self._batch_tokens = self._looked_up_tokens = self._hit_tokens = self._preemptions = 0

    def device_health(self, state: HealthState) -> None:
        """The state that a device is in; it has no series before it is watched."""
        for one in HealthState:
            self.device.labels(state=one.value).set(float(one is state))

    def engine_died(self, *, hung: bool) -> None:
        """Count an engine's death; nothing is held any more."""
        self.show_steps()
        self.engine_deaths.inc()
        self.engine_hangs.inc(hung)
        for gauge in (self.queued, self.kv_used, self.kv_free, self.kv_cached):
            gauge.set(0)


class _BeforeOthers(Collector):
    """Is asked first, since it is registered first, and has no series of its own."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """None: so nothing is collected when it is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """None, after the others have been brought up to date."""
        self._metrics.show_steps()
        return ()
