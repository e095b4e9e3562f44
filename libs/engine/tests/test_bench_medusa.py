"""What ``make bench-medusa`` does with shapes, rows and logs: no device is needed for it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.cuda.graphs import SIZES

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
    from medusa_shapes import MEDUSA_SHAPES, PAPER_GIB, PAPER_NODES

    assert len(MEDUSA_SHAPES) == 10
    assert {*PAPER_GIB} == {*PAPER_NODES} == {*MEDUSA_SHAPES} - {"mistral-7b"}
    for shape in MEDUSA_SHAPES:
        spec = spec_of(shape)
        if shape in PAPER_GIB:
            assert spec.total_bytes / (1 << 30) == pytest.approx(PAPER_GIB[shape], abs=0.051)
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


def test_medusas_way_is_recorded_at_two_places_first(
    measure: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = measure(["yi-6b"], ["vllm", "medusa"], capsys)
    assert [way for way, _ in rows] == ["witness", "pointers", "medusa"]


def test_medusas_way_uses_what_was_recorded_before(tmp_path: Path) -> None:
    import medusa

    run = medusa.Run(tmp_path, tmp_path / "lines", "", 60.0)
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
    assert "vllm yi-9b: no interpreter has vLLM" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert [one["medians"] for one in found["measurements"]] == [
        {"total_s": 1.0, "nodes": 7},
        {"total_s": 0.5, "nodes": 7},
    ]
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
    run = medusa.Run(tmp_path, tmp_path / "lines", sys.executable, 60.0)
    ways = run.ways_of("qwen1.5-0.5b", ["vllm-eager", "vllm"])
    assert ways == ["vllm-cold", "vllm", "vllm-eager"]
    for way in ways:
        run.measure(way, "qwen1.5-0.5b")
    assert not run.missing
    assert run.rows["vllm-eager", "qwen1.5-0.5b"] == [{"total_s": 1.0, "version": "1"}]
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
