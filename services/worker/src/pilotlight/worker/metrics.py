"""What a worker process counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class WorkerMetrics:
    """Metrics of one worker process; simulated workers share them, so that there are as many series however many they are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.accepted = Counter("pilotlight_worker_requests_accepted", "Requests that were accepted.", registry=registry)
        self.refused = Counter("pilotlight_worker_requests_refused", "Requests that were refused.", ["code"], registry=registry)
        self.finished = Counter("pilotlight_worker_requests_finished", "Requests that ended.", ["finish"], registry=registry)
        self.tokens = Counter("pilotlight_worker_tokens", "Output tokens that engines made.", registry=registry)
        self.resends = Counter("pilotlight_worker_resends", "Resends that gateways asked for.", registry=registry)
        self.loads = Counter("pilotlight_worker_loads", "Stage loads, by how they ended.", ["outcome"], registry=registry)
        self.stale = Counter("pilotlight_worker_stale_commands", "Commands refused for their epoch.", registry=registry)
        self.given_up = Counter("pilotlight_worker_stages_given_up", "Stages unloaded for the cache.", registry=registry)
        self.engine_deaths = Counter("pilotlight_worker_engine_deaths", "Engines that ended unexpectedly.", registry=registry)
        self.running = Gauge("pilotlight_worker_requests_running", "Requests that engines have not ended.", registry=registry)
        self.step_s = Histogram(
            "pilotlight_worker_step_seconds",
            "How long an engine step takes.",
            buckets=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0),
            registry=registry,
        )
