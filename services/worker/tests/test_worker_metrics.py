"""What a worker counts of its engine's steps."""

from prometheus_client import CollectorRegistry

from pilotlight.common.messages.engine import StepDone
from pilotlight.worker.metrics import WorkerMetrics


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
    metrics.engine_died(hung=False)
    assert seen(*held, "engine_deaths_total") == [0, 0, 0, 0, 1]
