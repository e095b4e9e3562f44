"""``make bench-cache``: lines become measurements; ``make bench-cache-real``: which pairs count."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from pilotlight.sim.cache.paper import Pairing, paper_workload

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_lines_become_measurements() -> None:
    from cache import DRIFT, measured, paper_cell, worked
    from cache_results import COLUMNS, measurements

    make = partial(paper_workload, Pairing.RANDOM, drift=DRIFT)
    names = ["lru", "lfu"]
    cell = partial(
        paper_cell,
        "drift",
        make,
        range(2),
        0.6,
        names,
        sizes="large",
        pairing="random",
        drift_s=DRIFT.period_s,
    )
    (lines,) = worked([cell], jobs=1)
    assert list(worked([cell, cell], jobs=2)) == [lines, lines]
    lines = json.loads(json.dumps(lines))
    (found,) = measurements(lines, {"commit": "abcdef0"})
    assert found["commit"] == "abcdef0"
    what = "periods of drift: seven models, large, random, drift each 300 s, cache of 60%"
    assert found["what"] == what
    assert set(found["samples"]) == {*names, "true-rates"}
    results, _, _ = measured(make, range(2), 0.6, names)
    for name in names:
        wanted = [round(one.load_s_per_request, 5) for one in results[name]]
        assert found["samples"][name] == wanted
        assert fmean(found["samples"][name]) > found["optimum"]
        row = dict(zip(COLUMNS, found["policies"][name], strict=True))
        assert row["load_s_p99"] == pytest.approx(
            fmean(one.quantile_s(0.99) for one in results[name]), rel=1e-3
        )
    (small,) = measurements([{**line, "sizes": "base"} for line in lines], {})
    assert (small["samples"], "policies" in small) == (found["samples"], False)


def test_one_policy_is_renewed_beside_the_others() -> None:
    from cache_results import renewed

    before = {
        "what": "w",
        "samples": {"lru": [4.0, 6.0], "ours": [4.0, 4.0]},
        "policies": {"lru": [0.5, 8.0], "ours": [0.6, 9.0]},
    }
    run = {"what": "w", "samples": {"ours": [3.0, 4.0]}, "policies": {"ours": [0.7, 7.0]}}
    (found,) = renewed([before], [run], "ours", "abcdef0")
    assert found["renewed"] == {"ours": "abcdef0"}
    assert found["samples"] == {"lru": [4.0, 6.0], "ours": [3.0, 4.0]}
    assert found["policies"] == {"lru": [0.5, 8.0], "ours": [0.7, 7.0]}


def test_results_are_lines_that_can_be_read() -> None:
    from cache_results import LINE_WIDTH, readable

    found = {
        "benchmark": "cache",
        "measurements": [
            {"what": "ä" * 190, "samples": {"lru": [1.5] * 40, "none": []}, "no": None}
        ],
    }
    text = readable(found)
    assert json.loads(text) == found
    assert max(map(len, text.splitlines())) <= LINE_WIDTH
    assert '\n   "samples": {"lru": [1.5, ' in text


def test_pairs_that_simulation_tells_apart_are_those_that_count() -> None:
    from cache_real import verdict

    expected = {"a": 100, "b": 95, "c": 80}
    found = verdict(expected, {"a": [90, 70, 91], "b": [99], "c": [95, 60, 96]}, 0.1)
    assert found["order_kept"] is False
    assert [(one["better"], one["worse"], one["kept"]) for one in found["pairs"]] == [
        ("c", "a", False),
        ("c", "b", True),
    ]
    assert found["pairs"][0]["simulated_reloads"] == [80, 100]
    assert found["pairs"][0]["median_reloads"] == [95, 90]
    assert verdict(expected, {"a": [9], "b": [9], "c": [8]}, 0.1)["order_kept"] is True


def test_what_is_run_by_default_has_pairs() -> None:
    from cache_real import Trial, timeless, told_apart

    trial = Trial(models=8, room=3, requests=400, duration_s=200.0, zipf=1.8, max_tokens=8, seed=5)
    alone = timeless(trial, ("lru", "gdsf", "iam", "pilotlight"))
    assert ("iam", "lru") in told_apart(alone, 0.1)
    assert alone["pilotlight"] <= alone["iam"]


def test_a_device_for_some_demo_models_never_holds_one_more() -> None:
    from cache_expected import LOADS_S, device_bytes, expected_reloads
    from cache_real import Trial

    assert device_bytes(3) == 3 * device_bytes(1)
    even = Trial(models=4, room=3, requests=120, duration_s=180.0, zipf=0.0, max_tokens=8, seed=5)
    tight, free = (
        expected_reloads(one.asked(), "lru", LOADS_S[:2]) for one in (even, replace(even, room=4))
    )
    assert min(tight) > 2 * max(free), "but for the first loads, when instances have more room"


def test_seconds_of_loads_are_from_plans_until_instances_are_ready() -> None:
    from cache_real import loading_s

    at = "2026-01-01T00:00:0{}Z".format
    found = [
        {"action": "instance_planned", "instance_id": "a", "timestamp": at("1.0")},
        {"action": "instance_planned", "instance_id": "b", "timestamp": at("1.5")},
        {"action": "other"},
        {"action": "instance_ready", "instance_id": "a", "timestamp": at("2.0")},
        {"action": "instance_ready", "instance_id": "b", "timestamp": at("2.0")},
        {"action": "instance_ready", "instance_id": "unknown", "timestamp": at("2.0")},
    ]
    assert loading_s(found) == pytest.approx(1.5)


def test_the_trace_is_that_of_its_seed_and_in_time() -> None:
    from cache_real import Trial

    def trace(seed: int) -> list[tuple[float, str]]:
        trial = Trial(
            models=8, room=3, requests=200, duration_s=60.0, zipf=1.2, max_tokens=8, seed=seed
        )
        return [(one.time_s, one.model) for one in trial.workload().requests]

    found = trace(5)
    assert found == trace(5) != trace(6)
    times = [time_s for time_s, _ in found]
    assert times == sorted(times)
    assert 0.0 <= times[0] < times[-1] <= 60.0
    assert {name for _, name in found} == {f"ember-{number}" for number in range(8)}


def test_the_trace_of_models_that_share_a_gpu_asks_for_each() -> None:
    from cache_gpu import MODELS, has_text, told, zipf_trace

    trace = zipf_trace(MODELS, 150, 5)
    assert trace == zipf_trace(MODELS, 150, 5) != zipf_trace(MODELS, 150, 6)
    assert (len(trace), set(trace)) == (150, set(range(MODELS)))
    counts = sorted((trace.count(number) for number in range(MODELS)), reverse=True)
    assert counts[0] > 3 * counts[-1]
    assert has_text(b'data: {"choices": [{"text": "a"}]}\n')
    quiet = (b"\n", b"data: [DONE]\n", b'data: {"choices": [{"text": ""}]}\n', b'data: {"x": 1}')
    assert not any(map(has_text, quiet))
    assert told([0.1, 0.2, 0.3])["p50_ms"] == 200.0


def test_a_variant_of_a_model_is_another_checkpoint_of_the_same_files(tmp_path: Path) -> None:
    from cache_gpu import size_of, variant

    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"rope_theta": 1.0}')
    made = variant(folder, 2)
    assert variant(folder, 2) == made
    assert (made / "model.safetensors").samefile(folder / "model.safetensors")
    assert json.loads((made / "config.json").read_text()) == {"rope_theta": 3.0}
    assert json.loads((folder / "config.json").read_text()) == {"rope_theta": 1.0}
    assert size_of(made) == 7
