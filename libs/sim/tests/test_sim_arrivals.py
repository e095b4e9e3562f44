"""Arrivals: their rate, shape and popularity, and the formats of recorded traces."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.sim.cluster.arrivals import MAX_TOKENS, read_trace, requests_of, weights_of
from pilotlight.sim.cluster.scenario import Arrivals, BadScenario, Scenario, read_builtin

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.9799600,318,8\n"
    "2023-11-16 18:17:07.9799600,100,20\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": at_ms, "input_length": 60, "output_length": 6, "hash_ids": [1]}) + "\n"
    for at_ms in (500, 1500, 4500)
)


def _scenario(**changes: object) -> Scenario:
    scenario = read_builtin("paraserve-testbed-1")
    arrivals = replace(Arrivals(duration_s=2000.0, per_s=2.0), **changes)
    return replace(scenario, arrivals=arrivals)


@pytest.mark.parametrize(("name", "text"), [("a.csv", AZURE), ("m.jsonl", MOONCAKE)])
def test_a_trace_keeps_its_shape_at_another_rate(tmp_path: Path, name: str, text: str) -> None:
    """Three requests in 4 s, at 0, 1 and 4 s: six a second is eight of each, and then anew."""
    file = tmp_path / name
    file.write_text(text)
    traced = read_trace(file)
    assert [one.at_s for one in traced] == pytest.approx([0.0, 1.0, 4.0])
    scenario = _scenario(kind="trace", trace=str(file), per_s=6.0, duration_s=40.0)
    requests = list(requests_of(scenario, 1))
    assert [one.arrived_s for one in requests] == sorted(one.arrived_s for one in requests)
    first = Counter(one.arrived_s for one in requests if one.arrived_s < 4.0005)
    assert list(first) == pytest.approx([0.0, 1.0, 4.0])
    assert set(first.values()) <= {8, 9}
    assert len(requests) == pytest.approx(240, rel=0.05)
    assert max(one.prompt_tokens for one in requests) <= MAX_TOKENS


@pytest.mark.parametrize("shape", ["conversations", "code"])
def test_the_shapes_of_azures_traces_come_with_the_package(shape: str) -> None:
    requests = list(requests_of(_scenario(kind="trace", trace=shape), 1))
    assert len(requests) == pytest.approx(4000, rel=0.3)


def test_a_burst_has_its_factor_within_its_seconds() -> None:
    """Five times as many in 2 s, four times in 2,000 s."""
    scenario = _scenario(kind="burst", per_s=50.0, burst_factor=5.0, burst_s=2.0, bursts=4)
    counts = Counter(int(one.arrived_s // 2) for one in requests_of(scenario, 1))
    bursts = {200, 400, 600, 800}
    assert {window for window, count in counts.items() if count > 300} == bursts
    rest = [count for window, count in counts.items() if window not in bursts]
    assert sum(rest) / len(rest) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("law", "models", "of_requests"), [("azure-functions", 71, 0.996), ("model-market", 23, 0.9865)]
)
def test_a_published_law_gives_few_models_most_requests(
    law: str, models: int, of_requests: float
) -> None:
    weights = weights_of(Arrivals(popularity=law, zipf=0.8), 384)
    assert sum(weights) == pytest.approx(1.0)
    assert sum(weights[:models]) == pytest.approx(of_requests)
    assert weights == sorted(weights, reverse=True)
    assert weights_of(Arrivals(popularity=law), 1) == [1.0]


def test_equal_seeds_give_equal_requests() -> None:
    first, again, other = (
        [(one.arrived_s, one.model, one.prompt_tokens) for one in requests_of(_scenario(), seed)]
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": "now"}\n'])
def test_a_trace_of_no_known_format_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(BadScenario, match="trace"):
        read_trace(file)
