"""``make test-gpu`` without a GPU: a line for each check, and FAIL."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bounded_runs
import test_gpu as runner

SCRIPT = Path(runner.__file__)
DEADLINE_S = 60.0
JUNIT = """<testsuites><testsuite>
<testcase name="test_seen" time="0.25"><properties><property name="name" value="H200"/></properties></testcase>
<testcase name="test_broken" time="0.5"><failure message="assert 1 == 2">trace</failure></testcase>
<testcase name="test_no_device" time="0"><error message="no CUDA">trace</error></testcase>
<testcase name="test_left_out" time="0"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_says_what_is_missing_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--bundle", tmp_path]
    done = subprocess.run(
        command,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    *lines, last = done.stdout.splitlines()
    assert done.returncode == 1
    assert last == "FAIL"
    checks = [json.loads(line) for line in lines]
    assert all(set(check) == {"check", "ok", "seconds", "detail"} for check in checks)
    assert [check["check"] for check in checks] == [
        "driver",
        "environment",
        "torch",
        "device",
        "chat",
        "chat again",
        "engine",
        "bench",
    ]
    assert not any(check["ok"] for check in checks)
    assert "there is no nvidia-smi" in checks[0]["detail"]
    assert "no folder that `make bundle` made" in checks[1]["detail"]
    assert checks[2]["detail"] == "not run: there is no environment"


def test_cases_of_a_run() -> None:
    seen, broken, no_device, left_out = bounded_runs.cases_of(JUNIT)
    assert (seen.outcome, seen.detail, seen.seconds) == ("passed", {"name": "H200"}, 0.25)
    assert (broken.outcome, broken.detail) == ("failed", "assert 1 == 2")
    assert (no_device.outcome, no_device.detail) == ("failed", "no CUDA")
    assert (left_out.outcome, left_out.detail) == ("skipped", "why")


def test_a_step_past_its_deadline_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_runs, "STOP_GRACE_S", 0.2)
    deaf = "trap '' TERM; sleep 1000 & echo $! >child; wait; wait"
    with pytest.raises(bounded_runs.CheckFailed, match="was not done after 1 s"):
        bounded_runs.finish(["sh", "-c", f"cd {tmp_path}; {deaf}"], 1.0)
    # One that has ended has no command line, also before it is reaped.
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/cmdline").read_bytes() == b""


def test_what_is_not_understood_is_a_check_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    report = runner.Report()
    assert report.step("chat", 10.0, lambda left_s: json.loads("RESULT none")) is None
    assert "not understood" in json.loads(capsys.readouterr().out)["detail"]
    assert not report.all_ok


def test_past_the_whole_nothing_is_begun(capsys: pytest.CaptureFixture[str]) -> None:
    report = runner.Report(began_s=runner.now_s() - runner.TOTAL_S)
    assert report.step("late", 10.0, lambda left_s: (left_s, left_s)) is None
    assert "not run" in json.loads(capsys.readouterr().out)["detail"]
    assert not report.all_ok


def test_files_that_measure_run_with_nothing_beside_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def run(
        python: str, arguments: list[str], left_s: float
    ) -> tuple[list[bounded_runs.Case], subprocess.CompletedProcess[str]]:
        asked.append(arguments)
        return [bounded_runs.Case("test_one", "passed", 0.1, {})], subprocess.CompletedProcess(
            [], 0, "", ""
        )

    monkeypatch.setattr(runner, "pytest", run)
    monkeypatch.setattr(runner, "side_by_side", lambda python, count: ("-n", str(count)))
    runner.device_tests(runner.Report(), "python")
    together, alone = asked
    assert [json.loads(line)["check"] for line in capsys.readouterr().out.splitlines()] == [
        "device: test_one",
        "alone: test_one",
    ]
    files = {
        f"tests/gpu/{path.name}" for path in (bounded_runs.ROOT / "tests" / "gpu").glob("test_*.py")
    }
    assert set(together) | set(alone) >= files
    assert not set(together) & set(alone) & files
    assert "tests/gpu/test_gpu_arena.py" in alone
    assert together[-2] == "-n"
    assert "-n" not in alone


def test_the_benchmarks_figures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"shape": shape, "row": "decode, batch 1", "unit": "ms", "ours": ours}
        for shape, ours in (("4B", 2.4), ("8B", 4.2))
    ]
    said: list[object] = [*lines, {"shapes": {}, "missed": []}]
    status = 0

    def run(
        command: list[str], left_s: float, variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, status, "\n".join(map(json.dumps, said)), "MISSED  8B: left out"
        )

    monkeypatch.setattr(runner, "finish", run)
    assert runner.bench("python", 100.0)[0] == {
        "4B": {"decode, batch 1": "2.4 ms"},
        "8B": {"decode, batch 1": "4.2 ms"},
    }
    del said[1]
    with pytest.raises(bounded_runs.CheckFailed, match="no figure of 8B"):
        runner.bench("python", 100.0)
    status = 1
    with pytest.raises(bounded_runs.CheckFailed, match="left out"):
        runner.bench("python", 100.0)


def test_tests_run_side_by_side_where_there_is_xdist() -> None:
    there = runner.side_by_side(sys.executable, 2)
    assert there in ((), ("-p", "xdist", "-n", "2", "--dist", "load"))
    assert runner.side_by_side(sys.executable, 1) == ()
    assert runner.side_by_side("/bin/false", 8) == ()
