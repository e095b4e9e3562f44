"""Decisions of a running system: explained, compared with what came of them, and decided again from
their log; and a bus that is silent for a while ends nothing.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL, HURRIED = "ember-7m", "hurried"
FROZEN_S = 3.5
"""Longer than a worker may be silent before it is taken for dead."""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder) / "home"


@pytest.fixture(scope="module")
def system(home: Path) -> Iterator[RunningSystem]:
    environment = {"PILOTLIGHT_MODEL_ROOTS": str(DEMO_FOLDER)}
    with running(home, "--with-demo-model", environment=environment) as started:
        yield started


def chat(system: RunningSystem, model: str) -> str:
    with system.openai() as client:
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is a pilot light?"}],
            temperature=0,
            max_tokens=8,
        )
    return reply.choices[0].message.content or ""


def decisions(system: RunningSystem, model: str) -> list[dict[str, Any]]:
    with system.admin() as admin:
        found = admin.get("/decisions", params={"model": model}).json()["decisions"]
    return [one for one in found if one["kind"] == "cold_start"]


def instances(system: RunningSystem, model: str) -> dict[str, str]:
    with system.admin() as admin:
        listed = admin.get("/instances").json()["instances"]
    return {one["instance_id"]: one["state"] for one in listed if one["model"] == model}


def nats_pid(system: RunningSystem) -> int:
    parent = system.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(
        int(pid) for pid in children if b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_a_start_is_explained_with_what_came_of_it(system: RunningSystem) -> None:
    assert system.cli("why", MODEL)["waits_for"].startswith(f"{MODEL} waits for nothing")
    chat(system, MODEL)
    (decision,) = decisions(system, MODEL)
    eventually(lambda: decisions(system, MODEL)[0]["actual"])
    shown = system.cli("decision", decision["decision_id"])
    assert shown["outcome"]["scheme"]["predicted_phase_s"]["load"] > 0
    assert shown["outcome"]["meets_slo"]
    assert shown["actual"]["ttft_s"] > 0
    assert shown["policy_version"]
    assert "it is served by" in system.cli("why", MODEL)["waits_for"]


def test_an_slo_that_cannot_be_met_gets_one_start_and_a_reason(system: RunningSystem) -> None:
    system.cli("model", "add", HURRIED, str(DEMO_FOLDER), "--ttft-ms", "1")
    chat(system, HURRIED)
    (decision,) = decisions(system, HURRIED)
    assert not decision["outcome"]["meets_slo"]
    assert len(instances(system, HURRIED)) == 1


def test_a_bus_that_is_silent_for_a_while_is_told_and_ends_nothing(system: RunningSystem) -> None:
    """Workers are not taken for dead because nothing could be heard of them."""
    chat(system, MODEL)
    before = instances(system, MODEL)
    pid = nats_pid(system)
    os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(FROZEN_S)
        ready = httpx2.get(f"{system.url}/readyz")
        assert (ready.status_code, ready.text) == (503, "NATS cannot be reached\n")
    finally:
        os.kill(pid, signal.SIGCONT)
    for process in ("gateway", "scheduler", "cache", "loader"):
        eventually(lambda process=process: system.logged(process, "bus_silent"))
    chat(system, MODEL)
    after = instances(system, MODEL)
    assert after == before
    assert set(after.values()) == {"ready"}


def test_the_log_of_the_whole_run_decides_the_same(home: Path, system: RunningSystem) -> None:
    """Two starts, a silent bus, the end: the last test of this file ends the system."""
    system.process.send_signal(signal.SIGINT)
    system.process.wait(60.0)
    files = sorted((home / "state" / "decisions").iterdir())
    assert files
    replayed = [system.cli("replay", str(path)) for path in files]
    assert all(one["identical"] for one in replayed), replayed
    assert sum(one["decisions"] for one in replayed) >= 4
