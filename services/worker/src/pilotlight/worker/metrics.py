"""What a worker process counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pilotlight.common.messages.engine import StepDone
from pilotlight.policy.cluster import HealthState


class WorkerMetrics:
    """Metrics of one worker process; simulated workers share them, so that there are as many series
    however many they are.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.accepted = Counter(
            "pilotlight_worker_requests_accepted", "Requests that were accepted.", registry=registry
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
        self.step_s = Histogram(
            "pilotlight_worker_step_seconds",
            "How long an engine step takes.",
            buckets=(
                0.001,
                0.002,
                0.004,
                0.008,
                0.016,
                0.032,
                0.064,
                0.128,
                0.256,
                0.512,
                1.0,
                2.0,
            ),
            registry=registry,
        )

    def stepped(self, step: StepDone) -> None:
        """Count one engine step."""
        self.step_s.observe(step.step_time_s)
        self.queued.set(step.waiting)
        self.kv_used.set(step.kv_used_tokens)
        self.kv_free.set(step.kv_free_tokens)
        self.kv_cached.set(step.kv_cached_tokens)
        self.batch_tokens.inc(step.batch_tokens)
        self.prefix_looked_up.inc(step.prefix_looked_up_tokens)
        self.prefix_hits.inc(step.prefix_hit_tokens)
        self.preemptions.inc(step.preemptions)

    def device_health(self, state: HealthState) -> None:
        """The state that a device is in; it has no series before it is watched."""
        for one in HealthState:
            self.device.labels(state=one.value).set(float(one is state))

    def engine_died(self, *, hung: bool) -> None:
        """Count an engine's death; nothing is held any more."""
        self.engine_deaths.inc()
        self.engine_hangs.inc(hung)
        for gauge in (self.queued, self.kv_used, self.kv_free, self.kv_cached):
            gauge.set(0)
