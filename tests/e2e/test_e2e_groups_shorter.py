"""A model that no worker could hold: it is served by a pipeline for good, and by one of four stages
that becomes one of two while it answers, in a whole system of four nodes.
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
DEVICE_BYTES = 24 << 20
"""The demo model takes 35 MB with its KV, half of its layers 19 MB."""
EASY_MS, HARD_MS = 60_000.0, 500.0
"""Two stages meet the one; nothing meets the other, and four come nearest."""
TOKENS = 150
PROMPT = "Once upon a time"


def environment(device_bytes: int) -> dict[str, str]:
    return {
        "PILOTLIGHT_MAX_STAGES": "4",
        "PILOTLIGHT_THREADS": "1",
        "PILOTLIGHT_POOL_BYTES": str(64 << 20),
        "PILOTLIGHT_DEVICE_BYTES": str(device_bytes),
        # The stream lasts for as long as stages take to grow, on whatever machine.
        "PILOTLIGHT_FAULTS": "step=0.03",
    }


@pytest.fixture(scope="module")
def text() -> str:
    """What one worker says that holds the model alone."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home", environment=environment(64 << 20)) as alone:
            added(alone, "alone", DEMO_FOLDER, EASY_MS)
            return said(alone, "alone")


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        arguments = ("--workers", "1", "--nodes", "4", "--link", LINK)
        home = Path(folder) / "home"
        with running(home, *arguments, environment=environment(DEVICE_BYTES)) as started:
            yield started


def added(
    system: RunningSystem, model: str, folder: Path, slo_ms: float, dtype: str = "float32"
) -> None:
    """In float32, so that stages round as one worker does."""
    slo = ("--ttft-ms", str(slo_ms), "--dtype", dtype)
    system.cli("model", "add", model, str(folder), *slo)


def said(system: RunningSystem, model: str, tokens: int = TOKENS) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=model,
            prompt=PROMPT,
            temperature=0,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens, "every token, once"
    return answer.choices[0].text


def group(system: RunningSystem, model: str, state: str, size: int) -> list[dict[str, Any]]:
    """The stages of a model's instance that is in a state."""
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    return next(
        (
            one["body"]["placements"]
            for one in found
            if one["model"] == model
            and one["state"] == state
            and len(one["body"]["placements"]) == size
        ),
        [],
    )


def held(system: RunningSystem) -> dict[str, list[str]]:
    """Models on each worker whose engine is up."""
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    return {
        one["worker_id"]: [stage["model"] for stage in one["held"]]
        for one in workers
        if one["engine_up"] and one["liveness"] == "alive"
    }


def removed(system: RunningSystem, model: str) -> None:
    """No stage of it stays behind."""
    system.cli("model", "rm", model)
    eventually(lambda: len(held(system)) == 4 and not any(held(system).values()), 60.0)


def ranges(stages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["stage"]["start"], one["stage"]["stop"]) for one in stages]


def workers_of(system: RunningSystem, node_id: str) -> list[int]:
    """Processes of the one worker of a node."""
    run, state = system.home / "run", system.home / "state"
    names = ("", *(f"node-{number}" for number in range(2, 5)))
    (name,) = (one for one in names if (state / one / "node-id").read_text().strip() == node_id)
    return [int(path.stem.rpartition("-")[2]) for path in (run / name).glob("worker-*.sock")]


def test_four_stages_become_two_while_they_answer(system: RunningSystem, text: str) -> None:
    added(system, "four", copied(system.home / "models", "four"), HARD_MS)
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(said, system, "four")
        before = eventually(lambda: group(system, "four", "consolidating", 4), 60.0)
        after = eventually(lambda: group(system, "four", "ready", 2), 60.0)
        assert not answer.done(), "it consolidates while it answers"
        assert answer.result() == text
    assert ranges(before)[0] == ranges(after)[0]
    assert ranges(after) == [(0, ranges(after)[1][0]), (ranges(after)[1][0], 8)]
    released = {one["worker_id"] for one in before} - {one["worker_id"] for one in after}
    assert len(released) == 2
    eventually(lambda: not any(held(system)[one] for one in released))
    assert said(system, "four") == text
    # What was let go serves another model, while the first one is there: with half of the bytes it
    # fits where nothing is held, and nowhere else.
    added(system, "next", copied(system.home / "models", "next"), EASY_MS, "bfloat16")
    said(system, "next", tokens=1)
    (serving,) = eventually(lambda: group(system, "next", "ready", 1))
    assert serving["worker_id"] in released
    system.cli("model", "rm", "next")
    removed(system, "four")


def test_a_pipeline_serves_for_good(system: RunningSystem, text: str) -> None:
    """Two stages that no fewer workers have room for; a lost one is brought by another worker."""
    added(system, "pair", copied(system.home / "models", "pair"), EASY_MS)
    assert said(system, "pair") == text
    stages = eventually(lambda: group(system, "pair", "ready", 2))
    assert ranges(stages) == [(0, 4), (4, 8)]
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(said, system, "pair")
        eventually(lambda: in_flight(system, "pair"))
        for pid in workers_of(system, stages[1]["node_id"]):
            os.kill(pid, signal.SIGKILL)
        assert answer.result() == text
    again = eventually(lambda: group(system, "pair", "ready", 2), 60.0)
    assert again[0]["worker_id"] == stages[0]["worker_id"]
    assert again[1]["worker_id"] != stages[1]["worker_id"]
    removed(system, "pair")


def in_flight(system: RunningSystem, model: str) -> int:
    with system.admin() as admin:
        workers = admin.get("/workers").json()["workers"]
    stages = [stage for one in workers for stage in one["held"]]
    return sum(stage["in_flight"] for stage in stages if stage["model"] == model)
