"""A group of two stages of which one is lost while it answers, in a whole system of three nodes:
the third one brings that stage, the other stays, and the client has every token once.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chaos.processes import Processes, Target
from embedded_system import DEMO_FOLDER, RunningSystem, copied, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "40mbit"
"""The demo model's 14 MB take one node 2.8 s."""
SLO_MS = 2_400.0
"""One node misses it; two are in time, or nearest."""
TOKENS = 100


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {
            "PILOTLIGHT_MAX_STAGES": "2",
            # The group is one for as long as it answers.
            "PILOTLIGHT_CONSOLIDATE": "false",
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_POOL_BYTES": str(64 << 20),
            "PILOTLIGHT_DEVICE_BYTES": str(128 << 20),
            "PILOTLIGHT_FAULTS": "step=0.02",
        }
        arguments = ("--workers", "1", "--nodes", "3", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            yield started


def added(system: RunningSystem, model: str, folder: Path, slo_ms: float = SLO_MS) -> None:
    """In float32, so that stages round as one worker does."""
    slo = ("--ttft-ms", str(slo_ms), "--dtype", "float32")
    system.cli("model", "add", model, str(folder), *slo)


def said(system: RunningSystem, model: str, got: list[str]) -> str:
    """An answer, whose tokens ``got`` has as they come."""
    with system.openai() as client:
        stream = client.completions.create(
            model=model,
            prompt="Once upon a time there was",
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        got.extend(
            chunk.choices[0].text for chunk in stream if chunk.choices and chunk.choices[0].text
        )
    return "".join(got)


def group_of(system: RunningSystem, model: str) -> dict[str, Any] | None:
    """The model's instance that has not ended."""
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    ours = [{**one["body"], **one} for one in found if one["model"] == model]
    return next((one for one in ours if one["state"] not in ("gone", "failed")), None)


@pytest.fixture(scope="module")
def text(system: RunningSystem) -> str:
    """What the model says that one worker loaded alone."""
    added(system, "alone", DEMO_FOLDER, slo_ms=60_000.0)
    spoken = said(system, "alone", [])
    system.cli("model", "rm", "alone")
    return spoken


def kill(system: RunningSystem, worker_id: str, *, engine: bool) -> None:
    """End a worker, or its engine alone, without a word."""
    processes = Processes(system.process.pid, "")
    (worker,) = (
        one
        for one in processes.of(Target.WORKER)
        if one.environment().get("PILOTLIGHT_WORKER_ID") == worker_id
    )
    os.kill(processes.engine_of(worker).pid if engine else worker.pid, signal.SIGKILL)


@pytest.mark.parametrize(("at", "engine"), [(1, True), (0, False)])
def test_another_worker_brings_the_stage_that_is_lost(
    system: RunningSystem, text: str, at: int, engine: bool
) -> None:
    name = f"lost-{at}"

    def is_free() -> bool:
        with system.admin() as admin:
            workers = admin.get("/workers").json()["workers"]
        return sum(one["engine_up"] and not one["held"] for one in workers) == 3

    eventually(is_free, 60.0)
    added(system, name, copied(system.home / "models", name))
    got: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(said, system, name, got)
        eventually(lambda: len(got) > 3, 60.0)
        before = group_of(system, name)
        assert before is not None
        assert len(before["placements"]) == 2
        kill(system, before["placements"][at]["worker_id"], engine=engine)
        assert answer.result() == text
    after = group_of(system, name)
    assert after is not None
    assert after["instance_id"] == before["instance_id"], "it is repaired, and not replaced"
    assert after["repairs"] == 1
    stays = after["placements"][1 - at]
    assert stays["worker_id"] == before["placements"][1 - at]["worker_id"]
    with system.admin() as admin:
        decisions = admin.get("/decisions", params={"model": name}).json()["decisions"]
    assert [one["kind"] for one in decisions].count("cold_start") == 1
    (repair,) = (one for one in decisions if one["kind"] == "repair")
    assert repair["outcome"]["repairs"] == 1
    system.cli("model", "rm", name)
