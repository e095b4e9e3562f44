"""A decision log, written and replayed: the same decisions, or the first difference."""

import dataclasses
import io
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from pilotlight.cli.main import run
from pilotlight.common.decision_log import FORMAT, Header, LogWriter, noted
from pilotlight.common.decision_replay import replay
from pilotlight.common.decision_rules import rules_change
from pilotlight.common.policy_version import policy_version
from pilotlight.policy.control.plan import ControlRules
from pilotlight.policy.control.tick import tick
from pilotlight.sim.cluster.leader import Decided
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import CONTENDERS, read_builtin


def _run(seconds: float = 120.0) -> tuple[list[Decided], ControlRules]:
    """Every tick of a simulated leader."""
    scenario = read_builtin("paraserve-testbed-1")
    arrivals = dataclasses.replace(scenario.arrivals, duration_s=seconds)
    scenario = dataclasses.replace(scenario, arrivals=arrivals)
    simulation = Simulation(scenario, CONTENDERS["pilotlight"], 3)
    log = simulation.leader.log = []
    simulation.run()
    return log, simulation.leader.rules


def _write(path: Path, log: Iterable[Decided], rules: ControlRules) -> None:
    header = Header(
        format=FORMAT,
        policy_version=policy_version(),
        epoch=1,
        started_at_s=0.0,
        rules=rules_change(rules),
    )
    with path.open("wb") as file:
        writer = LogWriter(file, header)
        for at, one in enumerate(log):
            writer.write(noted(one.facts, one.memory, one.plan, first=at == 0))
            writer.flush()
        writer.close()


@pytest.fixture(scope="module")
def ticks() -> tuple[list[Decided], ControlRules]:
    return _run()


def test_a_log_replays_in_another_process(
    ticks: tuple[list[Decided], ControlRules], tmp_path: Path
) -> None:
    """Also with another order of sets: nothing hangs on how names are hashed."""
    log, rules = ticks
    path = tmp_path / "one.decisions"
    _write(path, log, rules)
    for seed in ("1", "2"):
        main = "from pilotlight.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", main, "replay", str(path), "--json"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        said = msgspec.json.decode(done.stdout)
        assert said["identical"], said
        assert said["ticks"] == len(log)
        starts = sum(len(one.plan.start) for one in log)
        assert said["decisions"] >= starts > 10


def test_a_file_that_begins_later_replays_too(
    ticks: tuple[list[Decided], ControlRules], tmp_path: Path
) -> None:
    """The first tick of a file has no index; what it was handed is in the file."""
    log, rules = ticks
    middle = len(log) // 2
    memory = dataclasses.replace(log[middle].memory, index=None)
    books = log[middle].facts.books.settled()
    later = [dataclasses.replace(log[middle].facts, books=books)]
    later += [one.facts for one in log[middle + 1 :]]
    again: list[Decided] = []
    for facts in later:
        plan = tick(facts, memory, rules)
        again.append(Decided(facts, memory, plan))
        memory = plan.memory
    path = tmp_path / "later.decisions"
    _write(path, again, rules)
    assert again[0].memory.told_workers
    assert books.rows()
    found = replay(path)
    assert found.identical, found
    assert found.ticks == len(later)


def test_the_first_difference_is_said(
    ticks: tuple[list[Decided], ControlRules],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other figures decide otherwise: the log says when, and what."""
    log, rules = ticks
    path = tmp_path / "other.decisions"
    patient = dataclasses.replace(rules.scaling, instance_requests=1)
    _write(path, log, dataclasses.replace(rules, scaling=patient))
    found = replay(path)
    assert found.difference is not None
    assert found.ticks < len(log)
    assert run(["replay", str(path)]) == 1
    shown = capsys.readouterr().out
    assert f"tick {found.difference.tick} at" in shown


def test_a_file_that_was_cut_off_is_read_as_far_as_it_is_whole(
    ticks: tuple[list[Decided], ControlRules], tmp_path: Path
) -> None:
    """A process may be killed while it writes."""
    log, rules = ticks
    path = tmp_path / "cut.decisions"
    _write(path, log, rules)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    found = replay(path)
    assert found.identical
    assert 0 < found.ticks < len(log)


@pytest.mark.parametrize("content", [b"", b"not a log", b"\x78\x9c"])
def test_what_is_no_log_says_so(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of a traceback."""
    path = tmp_path / "x"
    path.write_bytes(content)
    assert run(["replay", str(path), "--json"]) == 1
    assert "no decision log" in capsys.readouterr().out


def test_a_log_is_small(ticks: tuple[list[Decided], ControlRules]) -> None:
    """A tick of a cluster of 20 workers in which something happened takes a few hundred bytes."""
    log, rules = ticks
    header = Header(
        format=FORMAT, policy_version="x", epoch=1, started_at_s=0.0, rules=rules_change(rules)
    )
    file = io.BytesIO()
    writer = LogWriter(file, header)
    for at, one in enumerate(log):
        writer.write(noted(one.facts, one.memory, one.plan, first=at == 0))
    writer.flush()
    assert writer.size_bytes < 400 * len(log)
