"""A model that several nodes bring together: a start of two stages that becomes one worker while it
answers, in a whole system of two nodes.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, copied, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "40mbit"
"""The demo model's 14 MB take one node 2.8 s."""
SLO_MS = {"shared": 2_400.0, "alone": 60_000.0, "lost": 2_400.0}
"""Enough for two nodes, and not for one; or for one."""
TOKENS = 120


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {
            "PILOTLIGHT_MAX_STAGES": "2",
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_POOL_BYTES": str(64 << 20),
            "PILOTLIGHT_DEVICE_BYTES": str(512 << 20),
            # The stream lasts for as long as a stage takes to grow, on whatever machine.
            "PILOTLIGHT_FAULTS": "step=0.03",
        }
        arguments = ("--workers", "1", "--nodes", "2", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            yield started


def added(system: RunningSystem, model: str, folder: Path) -> str:
    """In float32, so that stages round as one worker does."""
    slo = ("--ttft-ms", str(SLO_MS[model]), "--dtype", "float32")
    system.cli("model", "add", model, str(folder), *slo)
    return model


def workers_of(system: RunningSystem, node_id: str) -> list[int]:
    """Processes of the one worker of a node."""
    run, state = system.home / "run", system.home / "state"
    (name,) = (
        one for one in ("", "node-2") if (state / one / "node-id").read_text().strip() == node_id
    )
    return [int(path.stem.rpartition("-")[2]) for path in (run / name).glob("worker-*.sock")]


def said(system: RunningSystem, model: str, tokens: int = TOKENS) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=model,
            prompt="Once upon a time",
            temperature=0,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens, "every token, once"
    return answer.choices[0].text


def instances(system: RunningSystem, model: str) -> list[dict[str, Any]]:
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    return [{**one["body"], **one} for one in found if one["model"] == model]


def group(system: RunningSystem, model: str, state: str) -> dict[str, Any]:
    """The instance of two stages of a model that is in a state."""
    return next(
        (
            one
            for one in instances(system, model)
            if one["state"] == state and len(one["placements"]) == 2
        ),
        {},
    )


def held(system: RunningSystem) -> dict[str, list[str]]:
    """Models on each worker."""
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    return {one["worker_id"]: [stage["model"] for stage in one["held"]] for one in workers}


def test_two_nodes_bring_a_model_and_one_goes_on_with_it(system: RunningSystem) -> None:
    """The request that waited is answered by the pipeline and then by one worker, and says what the
    model says that one worker loaded alone.
    """
    added(system, "shared", DEMO_FOLDER)
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(said, system, "shared")
        stages = eventually(lambda: group(system, "shared", "consolidating"))["placements"]
        assert not answer.done(), "it consolidates while it answers"
        text = answer.result()
    (whole,) = instances(system, "shared")
    (placement,) = whole["placements"]
    lead, released = (one["worker_id"] for one in stages)
    assert (whole["state"], placement["worker_id"]) == ("ready", lead)
    assert eventually(lambda: held(system)[released] == []), "the other is free for any model"
    assert said(system, added(system, "alone", DEMO_FOLDER)) == text
    with system.admin() as admin:
        decisions = admin.get("/decisions", params={"model": "shared"}).json()["decisions"]
    kinds = {one["kind"] for one in decisions if one["instance_id"] == whole["instance_id"]}
    assert kinds == {"cold_start", "consolidation"}


def test_a_request_goes_on_elsewhere_when_a_stage_dies(system: RunningSystem) -> None:
    """Every token once, whatever the group had said before; no stage stays behind."""
    text = said(system, "shared")
    for model in ("shared", "alone"):
        system.cli("model", "rm", model)
    eventually(lambda: not any(held(system).values()))
    # Another checkpoint: of this one nothing lies in a host pool.
    added(system, "lost", copied(system.home / "models", "lost"))
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(said, system, "lost")
        last = eventually(
            lambda: group(system, "lost", "ready") or group(system, "lost", "consolidating")
        )["placements"][-1]
        for pid in workers_of(system, last["node_id"]):
            os.kill(pid, signal.SIGKILL)
        assert answer.result() == text
    (serves,) = [one for one in instances(system, "lost") if one["state"] == "ready"]
    workers = {one["worker_id"] for one in serves["placements"]}
    eventually(lambda: {worker for worker, models in held(system).items() if models} == workers)
