"""Where the time of a cold start goes: an injected delay shows in its phase, and in no other."""

import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, running

from pilotlight.cli.waterfall import is_whole
from pilotlight.common.clock import SystemClock

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DELAY_S = 0.2
NOISE_S = 0.08
"""A phase may differ by this much from run to run on a busy machine; a delay that leaked into it
would be more than twice that."""
REPEATS = 5
RECORD_DEADLINE_S = 30.0


def cold_start(system: RunningSystem, name: str) -> dict[str, Any]:
    """Ask a model that was never loaded: a copy of the demo model under its own name, so that
    nothing of it lies in the host pool.
    """
    folder = system.home / "models" / name
    shutil.copytree(DEMO_FOLDER, folder, copy_function=shutil.copy)
    with system.admin() as admin:
        body = {"name": name, "uri": folder.as_uri(), "slo": {"ttft_ms": 5000, "tpot_ms": 200}}
        assert admin.post("/models", json=body).status_code == 201
    return asked(system, name)


def asked(system: RunningSystem, name: str) -> dict[str, Any]:
    """The record of the cold start that a request began."""
    with (
        system.openai() as client,
        client.chat.completions.with_streaming_response.create(
            model=name, messages=[{"role": "user", "content": "Hello!"}], max_tokens=4, stream=True
        ) as response,
    ):
        list(response.parse())
        trace_id = response.headers["x-trace-id"]
    return finished(system, trace_id)


def finished(system: RunningSystem, trace_id: str) -> dict[str, Any]:
    """The record of a cold start, which is written behind."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + RECORD_DEADLINE_S
    with system.admin() as admin:
        while clock.monotonic_s() < deadline_s:
            found = admin.get(f"/traces/{trace_id}")
            records = found.json()["cold_starts"] if found.status_code == 200 else []
            if records and is_whole(records[0]):
                return records[0]
    raise AssertionError(
        f"no record of the cold start of {trace_id} after {RECORD_DEADLINE_S:g} s: {found.text}"
    )


def evict(system: RunningSystem, name: str) -> None:
    """Return when no engine holds the model. Its parameters stay in the host pool."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + RECORD_DEADLINE_S
    with system.admin() as admin:
        assert admin.post(f"/models/{name}/evict").status_code == 202
        while any(worker["held"] for worker in admin.get("/workers").json()["workers"]):
            assert clock.monotonic_s() < deadline_s, f"{name} is still held"


def totals(record: dict[str, Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phase in record["phases"]:
        sums[phase["name"]] = sums.get(phase["name"], 0.0) + phase["end_s"] - phase["start_s"]
    return sums


@contextmanager
def system_with(faults: str) -> Generator[RunningSystem]:
    """A system with a slow link to its models."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {"PILOTLIGHT_FAULTS": faults} if faults else {}
        with running(Path(folder) / "home", "--link", "200mbit", environment=environment) as system:
            yield system


def least(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Least total of each phase over a few cold starts."""
    sums = [totals(record) for record in records]
    return {name: min(one.get(name, 0.0) for one in sums) for name in set().union(*sums)}


def coverage(records: Sequence[dict[str, Any]]) -> float:
    """Median share of a few cold starts that their phases explain."""
    return sorted(record["coverage"] for record in records)[len(records) // 2]


@pytest.mark.parametrize("point", ["fetch", "load", "prefill"])
def test_a_delay_is_found_in_its_phase_alone(point: str) -> None:
    """Two systems start models by turns: a machine that becomes faster or slower does so for
    both.
    """
    with system_with("") as undisturbed, system_with(f"{point}={DELAY_S}") as slowed:
        names = [f"ember-{index}" for index in range(REPEATS)]
        pairs = [(cold_start(undisturbed, name), cold_start(slowed, name)) for name in names]
    usual, delayed = (least(records) for records in zip(*pairs, strict=True))
    assert delayed[point] - usual[point] == pytest.approx(DELAY_S, abs=NOISE_S)
    for other in {"fetch", "load", "prefill", "init", "schedule", "dispatch", "activate"} - {point}:
        assert delayed.get(other, 0.0) - usual.get(other, 0.0) < NOISE_S, (other, usual, delayed)
    assert coverage([record for _, record in pairs]) >= 0.95


def test_the_phases_explain_the_cold_start() -> None:
    with system_with("") as system:
        records = [cold_start(system, f"ember-{index}") for index in range(REPEATS)]
    assert set(least(records)) >= {
        "queue",
        "schedule",
        "dispatch",
        "fetch",
        "load",
        "prefill",
        "submit",
        "deliver",
    }
    assert coverage(records) >= 0.95


def test_the_phases_explain_starts_from_the_host_pool() -> None:
    """One takes a few tens of milliseconds, and most of its phases begin with a message between two
    processes: a busy machine may hold up one of several starts between two of them.
    """
    coverages: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home") as system:
            cold_start(system, "ember")
            for _ in range(REPEATS):
                evict(system, "ember")
                record = asked(system, "ember")
                assert "fetch" not in totals(record)
                coverages.append(record["coverage"])
    assert sorted(coverages)[REPEATS // 2] >= 0.95, coverages
