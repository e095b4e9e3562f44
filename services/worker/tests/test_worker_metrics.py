"""What a worker counts of its engine's steps."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, Histogram

from pilotlight.common.messages.engine import StepDone
from pilotlight.policy.request import FinishReason
from pilotlight.worker.metrics import STEP_BUCKETS_S, WorkerMetrics


def step(running: int, preemptions: int) -> StepDone:
    return StepDone(
        produced=[],
        waiting=3,
        running=running,
        kv_free_tokens=64,
        step_time_s=0.01,
        kv_used_tokens=96,
        kv_cached_tokens=32,
        batch_tokens=20,
        prefix_looked_up_tokens=40,
        prefix_hit_tokens=16,
        preemptions=preemptions,
    )


def test_steps_are_counted_and_a_death_leaves_nothing_held() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.stepped(step(running=2, preemptions=1))
    metrics.stepped(step(running=1, preemptions=2))
    metrics.gave(3)
    metrics.gave(4)

    def seen(*names: str) -> list[float | None]:
        return [registry.get_sample_value(f"pilotlight_worker_{name}") for name in names]

    held = ("requests_queued", "kv_used_tokens", "kv_free_tokens", "kv_cached_tokens")
    assert seen(*held) == [3, 96, 64, 32]
    counted = (
        "batch_tokens_total",
        "prefix_looked_up_tokens_total",
        "prefix_hit_tokens_total",
        "preemptions_total",
    )
    assert seen(*counted, "step_seconds_count", "engine_deaths_total") == [40, 80, 32, 3, 2, 0]
    assert seen("tokens_total") == [7]
    assert seen("tokens_total", "preemptions_total") == [7, 3], "each is told once"
    metrics.engine_died(hung=False)
    assert seen(*held, "engine_deaths_total") == [0, 0, 0, 0, 1]


@given(st.lists(st.floats(min_value=0.0, max_value=4.0), max_size=20))
def test_step_times_are_told_as_the_librarys_histogram_would(times_s: list[float]) -> None:
    registry, others = CollectorRegistry(), CollectorRegistry()
    metrics = WorkerMetrics(registry)
    library = Histogram(
        "pilotlight_worker_step_seconds",
        "How long an engine step takes.",
        buckets=STEP_BUCKETS_S,
        registry=others,
    )
    for step_time_s in times_s:
        metrics.stepped(structs.replace(step(1, 0), step_time_s=step_time_s))
        library.observe(step_time_s)

    def told(of: CollectorRegistry) -> dict[tuple[str, str], float]:
        return {
            (sample.name, sample.labels.get("le", "")): sample.value
            for family in of.collect()
            if family.name == "pilotlight_worker_step_seconds"
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    assert told(registry) == told(others)


def test_ends_are_counted_by_how_they_came() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    for finish in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP):
        metrics.ended(finish)

    def seen(finish: str) -> float | None:
        name = "pilotlight_worker_requests_finished_total"
        return registry.get_sample_value(name, {"finish": finish})

    assert (seen("stop"), seen("length"), seen("error")) == (2, 1, None)
    assert seen("stop") == 2, "each is told once"
