"""What ``make bench-medusa`` does with shapes, rows and logs: no device is needed for it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_models import spec_of

from pilotlight.engine.cuda.graphs import SIZES
from pilotlight.policy.model import Dtype

BENCH = Path(__file__).resolve().parents[3] / "bench"

JOB = """
import json, sys
way, shape, folder = sys.argv[1:4]
if way == "record":
    open(f"{folder}/{shape}.kernels", "w").close()
if way in ("witness", "pointers"):
    suffix = "witness" if way == "witness" else "pointers.json"
    open(f"{folder}/{shape}.{suffix}", "w").close()
if (way, shape) == ("plain", "yi-9b"):
    raise SystemExit(3)
print("what an engine prints")
print(json.dumps({"total_s": {"ours": 0.5}.get(way, 1.0), "graphs_refused": "", "nodes": 7}))
"""


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs it with engines that answer at once; gives what it wrote, and what it missed."""
    import medusa

    job = tmp_path / "job.py"
    job.write_text(JOB)
    monkeypatch.setattr(medusa, "JOB", job)
    monkeypatch.setattr(medusa, "POINTERS", job)

    def run(shapes: list[str], ways: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
        arguments = [
            *("--shapes", *shapes, "--ways", *ways, "--commit", "abcdef0 2026-01-02"),
            *("--lines", str(tmp_path / "lines"), "--out", str(tmp_path / "out.json")),
            *("--recorded", str(tmp_path / "recorded")),
        ]
        with pytest.raises(SystemExit, match="1"):
            medusa.main(arguments)
        said = capsys.readouterr().err
        rows = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
        return [(row["way"], row["shape"]) for row in rows], said

    return run


def test_shapes_have_the_sizes_of_the_papers_table() -> None:
    from engine_gpu_weights import config_of, spec_of
    from medusa_shapes import MEDUSA_SHAPES, PAPER_GIB, PAPER_NODES, parameters_gib

    assert len(MEDUSA_SHAPES) == 10
    assert {*PAPER_GIB} == {*PAPER_NODES} == {*MEDUSA_SHAPES} - {"mistral-7b"}
    for shape in MEDUSA_SHAPES:
        spec = spec_of(shape)
        if shape in PAPER_GIB:
            assert spec.total_bytes / (1 << 30) == pytest.approx(PAPER_GIB[shape], abs=0.051)
        assert parameters_gib(shape) == pytest.approx(spec.total_bytes / (1 << 30), abs=0.01)
        assert config_of(spec)["vocab_size"] == MEDUSA_SHAPES[shape]["vocab_size"]


def test_vllm_captures_the_same_sizes() -> None:
    import medusa

    assert medusa.SIZES == SIZES


def test_what_others_need_is_recorded_first_and_rows_that_are_there_stay(
    measure: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, said = measure(["yi-6b"], ["ours", "plain"], capsys)
    assert rows == [("record", "yi-6b"), ("plain", "yi-6b"), ("ours", "yi-6b")]
    assert said.splitlines()[-1] == "yi-6b: 0.50 s, and 1.00 s without materialization"
    more, _ = measure(["yi-6b"], ["ours", "plain", "plain-cold"], capsys)
    assert more == [*rows, ("plain-cold", "yi-6b")]


def test_vllms_parts_come_when_all_of_ours_are_there() -> None:
    import medusa

    ways = ("record", "vllm-cold", "ours", "vllm")
    parts = list(medusa.parts_of(["yi-6b", "yi-9b"], ways))
    assert parts == [
        ("yi-6b", ["record", "ours"]),
        ("yi-9b", ["record", "ours"]),
        ("yi-6b", ["vllm-cold", "vllm"]),
        ("yi-9b", ["vllm-cold", "vllm"]),
    ]
    assert list(medusa.parts_of(["yi-6b"], ["vllm"])) == [("yi-6b", ["vllm"])]


def test_a_row_begins_only_where_one_of_its_way_had_the_time(tmp_path: Path) -> None:
    import medusa

    lines = tmp_path / "lines"
    lines.write_text(json.dumps({"way": "plain", "shape": "yi-6b", "wall_s": 59.5}) + "\n")
    run = medusa.Run(tmp_path, lines, "", 59.0, {})
    assert (run.expected_s("plain"), run.expected_s("ours")) == (59.5, medusa.LEAST_S)
    run.measure("plain", "yi-9b")
    assert run.missing == ["plain yi-9b: 59 s are over, or will be before its end"]
    assert lines.read_text().count("\n") == 1


def test_a_shape_that_does_not_fit_is_left_out_by_name(
    measure: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import medusa

    monkeypatch.setattr(medusa, "device_gib", lambda: 24.0)
    rows, said = measure(["llama2-13b", "yi-6b"], ["plain", "ours"], capsys)
    assert {shape for _, shape in rows} == {"yi-6b"}
    assert "llama2-13b is left out: it needs 53 GiB, and the GPU has 24" in said


def test_results_keep_what_was_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import medusa_rows

    results, lines = tmp_path / "medusa.json", tmp_path / "medusa.jsonl"
    before, after = {"commit": "aaaaaaa"}, {"commit": "bbbbbbb"}
    old = [
        {"way": "plain", "shape": "yi-6b", **before, "total_s": 4.0, "version": ""},
        {"way": "ours", "shape": "yi-6b", **before, "total_s": 2.0},
        {"way": "ours", "shape": "yi-6b", **before, "total_s": 3.0, "images_s": 0.1},
        {"way": "vllm", "shape": "yi-6b", **before, "total_s": 50.0, "version": "0.24.0"},
    ]
    new = [
        {"way": "ours", "shape": "yi-6b", **after, "total_s": 0.5},
        {"way": "record", "shape": "llama2-7b", **after, "nodes": 9000},
    ]
    for rows in (old, new):
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr("sys.argv", ["medusa_rows.py", str(results), str(lines)])
        medusa_rows.main()
    told = capsys.readouterr().out.splitlines()
    assert told[2] == "| yi-6b |  (12,902) | 4.00 |  | 2.50 | 50.00 |  |  | -38% | 20 |  |"
    assert told[5:] == [
        "| llama2-7b | 9,000 (12,518) |  |  |  |  |  |  |  |  |  |",
        "| yi-6b |  (12,902) | 4.00 |  | 0.50 | 50.00 |  |  | -88% | 100 |  |",
    ]
    found = json.loads(results.read_text())["measurements"]
    assert [(one["what"].rpartition(" ")[2], one["commit"]) for one in found] == [
        ("llama2-7b", "bbbbbbb"),
        ("yi-6b", "aaaaaaa"),
        ("yi-6b", "bbbbbbb"),
        ("yi-6b", "aaaaaaa"),
    ]
    assert found[-1]["version"] == "0.24.0"
    rows = medusa_rows.read(results)
    assert medusa_rows.document(rows)["measurements"] == found


def test_the_figures_of_the_traces_are_made_from_what_was_measured(tmp_path: Path) -> None:
    import medusa_traces

    rows = medusa_traces.rows_of(medusa_traces.RESULTS, "qwen1.5-4b")
    of = {one.name: one for one in medusa_traces.strategies_of(rows)}
    assert of["ours"].ready_s == rows["ours"]["total_s"]
    assert of["plain"].step_s < of["eager"].step_s
    assert of["plain"].ready_s > of["eager"].ready_s > of["ours"].ready_s
    assert "medusa" not in {
        one.name
        for one in medusa_traces.strategies_of(
            {way: row for way, row in rows.items() if way != "medusa"}
        )
    }
    with_medusa = {**rows, "medusa": {"total_s": 1.25}}
    made = {one.name: one for one in medusa_traces.strategies_of(with_medusa)}
    assert (made["medusa"].ready_s, made["medusa"].step_s) == (1.25, of["ours"].step_s)
    with pytest.raises(SystemExit, match="not measured: steps"):
        medusa_traces.strategies_of({way: row for way, row in rows.items() if way != "steps"})
    scenario = medusa_traces.scenario_of("qwen1.5-4b", 7.4, of["ours"], 1.0, 5.0)
    told = medusa_traces.run(scenario, of["ours"], 1)
    assert told["ttft_p99_s"] >= told["ttft_p50_s"] > of["ours"].ready_s
    assert told["starts"] >= 1


def test_medusas_way_is_recorded_at_two_places_first(
    measure: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = measure(["yi-6b"], ["vllm", "medusa"], capsys)
    assert [way for way, _ in rows] == ["witness", "pointers", "medusa"]


def test_medusas_way_uses_what_was_recorded_before(tmp_path: Path) -> None:
    import medusa

    run = medusa.Run(tmp_path, tmp_path / "lines", "", 60.0, {})
    (tmp_path / "yi-6b.witness").touch()
    assert run.ways_of("yi-6b", ["medusa"]) == ["pointers", "medusa"]
    (tmp_path / "yi-6b.pointers.json").touch()
    assert run.ways_of("yi-6b", ["medusa"]) == ["medusa"]
    assert run.ways_of("yi-6b", ["pointers"]) == ["pointers"]
    before, (script, way, *_) = medusa.TRACED[:2], run._job("medusa", "yi-6b")[0][1:]
    assert before == ("witness", "pointers")
    assert (Path(script).name, way) == ("medusa_pointers.py", "medusa")


def test_what_fails_and_what_there_is_no_interpreter_for_is_told(
    measure: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows, said = measure(["yi-9b"], ["plain", "ours", "vllm"], capsys)
    assert rows == [("record", "yi-9b"), ("ours", "yi-9b")]
    assert "plain yi-9b: exit status 3" in said
    assert "vllm: no interpreter has vLLM" in said
    found = json.loads((tmp_path / "out.json").read_text())
    medians = [one["medians"] for one in found["measurements"]]
    assert [(one["total_s"], one["nodes"]) for one in medians] == [(1.0, 7), (0.5, 7)]
    assert all(one["wall_s"] > 0.0 for one in medians)
    assert {one["commit"] for one in found["measurements"]} == {"abcdef0"}


def test_vllm_is_asked_by_its_own_interpreter_and_warms_its_cache_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import medusa

    job = tmp_path / "vllm.py"
    job.write_text(
        "import json, os, sys\n"
        "assert os.environ['PYTHONPATH'] == ''\n"
        "assert os.path.exists(os.path.join(sys.argv[1], 'config.json'))\n"
        "print(json.dumps({'total_s': float('--eager' in sys.argv), 'version': '1'}))\n"
    )
    monkeypatch.setattr(medusa, "VLLM", job)
    run = medusa.Run(tmp_path, tmp_path / "lines", sys.executable, 60.0, {"commit": "abcdef0"})
    ways = run.ways_of("qwen1.5-0.5b", ["vllm-eager", "vllm"])
    assert ways == ["vllm-cold", "vllm", "vllm-eager"]
    for way in ways:
        run.measure(way, "qwen1.5-0.5b")
    assert not run.missing
    (row,) = run.rows["vllm-eager", "qwen1.5-0.5b"]
    assert (row["total_s"], row["version"], row["commit"]) == (1.0, "1", "abcdef0")
    assert run.ways_of("qwen1.5-0.5b", ["vllm-eager", "vllm"]) == []


@pytest.mark.parametrize(
    ("line", "stages"),
    [
        ("Loading weights took 0.39 seconds", {"weights_s": 0.39}),
        ("Model loading took 7.4221 GiB memory and 0.523112 seconds", {"weights_s": 0.523112}),
        ("torch.compile takes 12.34 s in total", {"compile_s": 12.34}),
        ("Graph capturing finished in 3 secs, took 0.51 GiB", {"capture_s": 3.0}),
        (
            "init engine (profile, create kv cache, warmup model) took 23.31 seconds",
            {"initialise_s": 23.31},
        ),
        ("GPU KV cache size: 1,234 tokens", {}),
        ("Available KV cache memory: 51.2 GiB", {}),
    ],
)
def test_vllms_log_says_how_long_its_stages_took(line: str, stages: dict[str, float]) -> None:
    from medusa_vllm import stages_of

    assert stages_of(line) == stages


@pytest.mark.anyio
async def test_parts_of_a_build_are_those_between_its_words() -> None:
    from medusa_offline import Parts

    parts = Parts()
    for step in ("start", "load", "validate", "validate", "store"):
        await parts.told(step, 0.0)
    told = parts.seconds()
    assert told["tries"] == 2
    assert {*told} == {"start_s", "load_s", "validate_s", "store_s", "total_s", "tries"}
    steps = [told[name] for name in told if name.endswith("_s") and name != "total_s"]
    assert sum(steps) == pytest.approx(told["total_s"])


@pytest.mark.anyio
async def test_the_tensors_of_a_builds_parts_lie_in_their_file(tmp_path: Path) -> None:
    from engine_gpu_weights import spec_of
    from medusa_offline import Source

    path = tmp_path / "pool"
    source = Source(spec_of("tiny"), path)
    size_bytes, parts = path.stat().st_size, 0
    async for ready in source:
        parts += 1
        assert ready.tensors
        assert all(one.offset + one.size_bytes <= size_bytes for one in ready.tensors)
    assert (parts, size_bytes % 4096) == (4, 0)


@pytest.mark.anyio
async def test_a_build_is_taken_apart_in_engines_of_their_own(tmp_path: Path) -> None:
    from medusa_offline import Source, measure, model_of

    from pilotlight.worker.engines.child_process import ChildOptions

    spec = replace(spec_of("qwen2", Dtype.BFLOAT16), max_context_tokens=64)
    model = replace(model_of("tiny"), spec=spec)
    source = Source(spec, tmp_path / "pool")
    told = await measure(model, source, ChildOptions(threads=1, log_path=tmp_path / "log"))
    steps = ("start_s", "load_s", "prefill_s", "decode_s", "canary_s", "validate_s", "store_s")
    assert all(told[name] >= 0.0 for name in steps)
    assert told["total_s"] == pytest.approx(sum(told[name] for name in steps))
    assert (told["tries"], told["steps"], told["graphs_refused"]) == (1, 0, "")
    assert told["bytes"] > 0
