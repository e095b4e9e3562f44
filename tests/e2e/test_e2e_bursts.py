"""A burst of requests for a cold model gets the instances that it needs, and they go when it is
over.
"""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MODEL = "wanted"
LINK = "20mbit"
"""The demo model's 14 MB take 5.6 s: all of the burst waits for them."""
EACH, BURST, INSTANCES = 2, 6, 3
"""Requests for an instance, requests at once, and what they come to; there are more workers."""


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {
            "PILOTLIGHT_MODEL_ROOTS": str(DEMO_FOLDER),
            "PILOTLIGHT_INSTANCE_REQUESTS": str(EACH),
        }
        arguments = ("--workers", str(INSTANCES + 1), "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            limits = ("--max-instances", str(INSTANCES + 1), "--keep-alive-s", "2")
            started.cli("model", "add", MODEL, str(DEMO_FOLDER), "--ttft-ms", "60000", *limits)
            yield started


def ask(system: RunningSystem) -> None:
    with system.openai() as client:
        client.completions.create(model=MODEL, prompt="Hello", temperature=0, max_tokens=32)


def listed(system: RunningSystem, what: str) -> list[dict[str, Any]]:
    with system.admin() as admin:
        found = admin.get(f"/{what}", params={"model": MODEL}).json()[what]
    return [one for one in found if one["model"] == MODEL]


def started(system: RunningSystem) -> list[str]:
    return [
        one["outcome"]["instance_id"]
        for one in listed(system, "decisions")
        if one["kind"] == "cold_start"
    ]


def test_a_burst_gets_an_instance_for_every_two_and_all_of_them_go(system: RunningSystem) -> None:
    with ThreadPoolExecutor(BURST) as clients:
        list(clients.map(lambda _: ask(system), range(BURST)))
    assert len(started(system)) == INSTANCES, "and no more"
    workers = {
        place["worker_id"]
        for one in listed(system, "decisions")
        if one["kind"] == "cold_start"
        for place in one["outcome"]["scheme"]["placements"]
    }
    assert len(workers) == INSTANCES
    eventually(lambda: {one["state"] for one in listed(system, "instances")} == {"gone"})
    assert len(started(system)) == INSTANCES, "and none came back"
