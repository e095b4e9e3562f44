"""Two cold starts over one link that would make each other late: the second waits for the first."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from embedded_system import RunningSystem, copied, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "10mbit"
"""The demo model's 14 MB take 11.2 s."""
SLO_MS = 14_000.0
"""Enough for one that fetches alone, and not for two that share the link."""
WAITS_S = 4.0
"""Half of what the second waits for: after 8.5 s half of the link is enough for the first one."""
NAMES = ("one", "two")


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        models = Path(folder) / "models"
        environment = {"PILOTLIGHT_MODEL_ROOTS": str(models)}
        paths = {name: copied(models, name) for name in NAMES}
        arguments = ("--workers", "2", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            for name, path in paths.items():
                started.cli("model", "add", name, str(path), "--ttft-ms", str(SLO_MS))
            yield started


def chat(system: RunningSystem, model: str) -> None:
    with system.openai() as client:
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            max_tokens=2,
        )


def cold_start(system: RunningSystem, model: str) -> dict[str, Any]:
    with system.admin() as admin:
        found = admin.get("/cold-starts", params={"model": model}).json()["cold_starts"]
    done = [one for one in found if one["status"] == "done"]
    return done[0] if len(done) == 1 else {}


def fetch_begun_s(cold: dict[str, Any]) -> float:
    return min(one["start_s"] for one in cold["phases"] if one["name"] == "fetch")


def test_the_second_start_waits_until_the_first_can_be_in_time(system: RunningSystem) -> None:
    """It is refused for as long as half of the link would be too little for the first one."""
    with ThreadPoolExecutor(2) as clients:
        list(clients.map(lambda name: chat(system, name), NAMES))
    starts = [eventually(lambda name=name: cold_start(system, name)) for name in NAMES]
    first, second = sorted(starts, key=fetch_begun_s)
    assert fetch_begun_s(second) - fetch_begun_s(first) > WAITS_S
    assert first["ttft_s"] < SLO_MS / 1000
    with system.admin() as admin:
        rows = admin.get("/decisions").json()["decisions"]
    refused = [one for one in rows if "refused" in one["outcome"]]
    assert "what runs there would be late" in " ".join(refused[-1]["reasons"])
