"""What ``make bench-medusa-traces`` makes of measured loading phases."""

import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
SHAPE = "qwen1.5-4b"
ROWS: dict[str, dict[str, Any]] = {
    "record": {"gib": 7.36, "prompts_refused": ""},
    "plain": {"total_s": 4.0, "warm_up_s": 1.5, "capture_s": 0.5},
    "medusa": {"total_s": 1.75, "rebuild_s": 0.25},
    "ours": {"total_s": 0.5, "rebuild_s": 0.25},
    "steps": {
        "eager_1_s": 0.01,
        "eager_16_s": 0.016,
        "graph_1_s": 0.004,
        "graph_16_s": 0.007,
        "eager_prefill_s": 0.04,
        "graph_prefill_s": 0.02,
        "prefill_tokens": 1024,
    },
}


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def lines(folder: Path, *, without: str = "") -> Path:
    rows = [{"way": way, "shape": SHAPE, **row} for way, row in ROWS.items() if way != without]
    rows.append({"way": "ours", "shape": "yi-6b", "total_s": 99.0})
    file = folder / "lines"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_strategies_are_what_was_measured(tmp_path: Path) -> None:
    from medusa_traces import rows_of, strategies_of

    made = {one.name: one for one in strategies_of(rows_of(lines(tmp_path), SHAPE))}
    ready = {name: one.ready_s for name, one in made.items()}
    assert ready == {"plain": 4.0, "medusa": 1.75, "ours": 0.5, "eager": 2.0}
    assert (made["eager"].step_s, made["ours"].step_s) == (0.01, 0.004)
    assert made["ours"].more_s == pytest.approx(0.0002)
    assert made["eager"].prefill_tokens_per_s == pytest.approx(25_600)


def test_results_of_another_device_are_read(tmp_path: Path) -> None:
    from medusa_rows import document, read
    from medusa_traces import rows_of

    results = document(read(lines(tmp_path)))
    for one in results["measurements"]:
        one["what"] = f"on an H100: {one['what']}"
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    assert rows_of(file, SHAPE) == rows_of(lines(tmp_path), SHAPE)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    from medusa_traces import rows_of, strategies_of

    with pytest.raises(SystemExit, match="not measured: steps"):
        strategies_of(rows_of(lines(tmp_path, without="steps"), SHAPE))


def test_a_faster_load_is_seen_in_first_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from medusa_traces import main

    file, out = lines(tmp_path), tmp_path / "out.json"
    arguments = ["--lines", str(file), "--out", str(out), "--commit", "abcdef0 2026-01-02"]
    main([*arguments, "--shape", SHAPE, "--rates", "0.5", "--seconds", "60", "--seeds", "1"])
    found = json.loads(out.read_text())["measurements"]
    p99 = {one["what"].split(",")[0]: one["medians"]["0.5/s ttft_p99_s"] for one in found}
    assert p99["ours"] < p99["medusa"] < p99["plain"]
    assert all(one["medians"]["0.5/s starts"] > 1 for one in found)
    assert "ready after 0.500 s" in capsys.readouterr().out
