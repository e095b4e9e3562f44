"""A model that several nodes bring together: a start of two stages that becomes one worker while it
answers, in a whole system of two nodes.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINK = "40mbit"
"""The demo model's 14 MB take one node 2.8 s."""
SLO_MS = 2_400.0
"""Enough for two nodes, and not for one."""
TOKENS = 200


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        environment = {
            "PILOTLIGHT_MAX_STAGES": "2",
            "PILOTLIGHT_THREADS": "1",
            "PILOTLIGHT_SPARE_ENGINE": "false",
            "PILOTLIGHT_POOL_BYTES": str(64 << 20),
            "PILOTLIGHT_DEVICE_BYTES": str(512 << 20),
            "PILOTLIGHT_MODEL_ROOTS": str(DEMO_FOLDER.parent),
            # The stream lasts for as long as a stage takes to grow, on whatever machine.
            "PILOTLIGHT_FAULTS": "step=0.02",
        }
        arguments = ("--workers", "1", "--nodes", "2", "--link", LINK)
        with running(Path(folder) / "home", *arguments, environment=environment) as started:
            yield started


def said(system: RunningSystem, model: str, tokens: int = TOKENS) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=model,
            prompt="Once upon a time",
            temperature=0,
            max_tokens=tokens,
            seed=1,
            extra_body={"ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    return answer.choices[0].text


def instances(system: RunningSystem, model: str) -> list[dict[str, Any]]:
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    return [one for one in found if one["model"] == model]


def test_two_nodes_bring_a_model_and_one_goes_on_with_it(system: RunningSystem) -> None:
    """The request that waited is answered by the pipeline and then by one worker, and says what the
    model says that one worker loaded alone.
    """
    system.cli(
        "model", "add", "shared", str(DEMO_FOLDER), "--ttft-ms", str(SLO_MS), "--dtype", "float32"
    )
    text = said(system, "shared")
    print(json.dumps(instances(system, "shared"), indent=1))
    with system.admin() as admin:
        print(json.dumps(admin.get("/decisions").json()["decisions"], indent=1)[:6000])
    shutil.copytree(system.home / "logs", "/tmp/groups-logs", dirs_exist_ok=True)
    shutil.copytree(system.home / "logs", "/tmp/groups-logs", dirs_exist_ok=True)
    assert text
    assert eventually
