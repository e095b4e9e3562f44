"""``make bench-materialize``: what logs and records say of a process that is truly cold, and which
floors are missed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
WALL_S = 1_700_000_000.0
"""From the clock of processes to the wall's."""


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def line(action: str, second: int, **more: Any) -> dict[str, Any]:
    """Of a log; the wall's clock stands at 22:13:20 when that of processes is at 0."""
    return {"action": action, "timestamp": f"2023-11-14T22:13:{20 + second}.250000Z", **more}


def test_logs_become_a_timeline() -> None:
    from materialize_process import timeline

    said = [
        line("engine_started", 4, libraries_s=1.5, context_s=0.25),
        line("engine_started", 9),
        line("workers_planned", 3),
        line("kernel_compiled", 5),
        {"action": "kernel_compiled"},
        {"event": "of another program"},
    ]
    assert timeline(iter(said), 2.0, WALL_S) == pytest.approx(
        {
            "compiled": 2,
            "planned_ms": 1250.0,
            "up_ms": 2250.0,
            "libraries_ms": 1500.0,
            "context_ms": 250.0,
        }
    )


def test_phases_end_on_the_clock_of_processes() -> None:
    from materialize_system import phases

    made = [("load", 10.0, 5.0), ("load", 11.0, 5.0), ("prefill", 12.5, 4.0)]
    found = [
        {"name": name, "end_s": end_s, "wall_offset_s": WALL_S - behind_s}
        for name, end_s, behind_s in made
    ]
    assert phases({"phases": found}, 2.0, WALL_S) == pytest.approx(
        {"load_end_ms": 4000.0, "prefill_end_ms": 6500.0}
    )
    assert phases({}, 2.0, WALL_S) == {}


def test_logs_are_read_on_from_where_they_were(tmp_path: Path) -> None:
    from materialize_system import Logs

    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text(json.dumps({"action": "one"}) + "\nno JSON\n3\n")
    logs = Logs(tmp_path)
    assert list(logs.news()) == [{"action": "one"}]
    with log.open("a") as file:
        file.write(json.dumps({"action": "two"}) + "\n")
    assert list(logs.news()) == [{"action": "two"}]
    log.write_text(json.dumps({"action": "3"}) + "\n")
    assert list(logs.news()) == [{"action": "3"}], "it was begun anew"


def test_processes_of_another_system_are_left_alone(tmp_path: Path) -> None:
    from materialize_process import processes

    program = "import sys; print(flush=True); sys.stdin.read()"
    homes = {tmp_path / "ours": False, tmp_path / "theirs": False}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, "pilotlight.loader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PILOTLIGHT_HOME": str(home)},
        )
        for home in homes
    ]
    try:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline()
        found = processes(tmp_path / "ours")
        assert [one.pid for one in found] == [running[0].pid]
        assert found[0].program == "pilotlight.loader"
    finally:
        for one in running:
            one.communicate()


def test_a_process_that_is_too_slow_misses_its_floor(tmp_path: Path) -> None:
    from materialize import PROCESS, Run, floors

    run = Run(tmp_path, 1.0)
    run.rows[PROCESS, "4B"] = [{"ttft_ms": 3900.0}, {"ttft_ms": 4100.0}, {"ttft_ms": 4200.0}]
    run.rows[PROCESS, "tiny"] = [{"ttft_ms": 9000.0}]
    (missed,) = floors(run)
    assert "4B" in missed
    assert "4100 ms" in missed
    run.rows[PROCESS, "4B"][1] = {"ttft_ms": 3900.0}
    assert list(floors(run)) == []


def test_a_start_in_a_worker_that_is_up_has_floors_for_its_token_and_its_gaps(
    tmp_path: Path,
) -> None:
    from materialize import UP, Run, floors

    run = Run(tmp_path, 1.0)
    row = {"ttft_ms": 180.0, "worst_gap_ms": 4.0, "median_gap_ms": 2.5}
    run.rows[UP, "4B"] = [row, {**row, "median_gap_ms": 0.0}]
    assert list(floors(run)) == []
    run.rows[UP, "4B"].append({"ttft_ms": 191.0, "worst_gap_ms": 9.0, "median_gap_ms": 2.5})
    assert len(list(floors(run))) == 1, "the worst gap"
    run.rows[UP, "8B"] = [{**row, "ttft_ms": 391.0}]
    assert any("391 ms" in missed for missed in floors(run))


def test_what_is_pinned_is_what_was_said_last() -> None:
    from materialize_up import pinned_mib

    said = [
        {"action": "pool_pinned", "pinned_bytes": 64 << 20},
        {"action": "pool_pinned", "pinned_bytes": 192 << 20},
        {"action": "another"},
    ]
    assert pinned_mib(said, 5.0) == 192.0
    assert pinned_mib([], 5.0) == 5.0
