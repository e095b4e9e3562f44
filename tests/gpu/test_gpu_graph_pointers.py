"""Graphs restored by what their addresses point to, and with kernels that the process has loaded:
bit for bit what they give at their addresses, with kernels from images.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

import pointer_steps

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
GRAPHS = 35 + 8
"""Of decode steps, and of prompts."""
CHILD_S = 300


def child(*arguments: str) -> dict[str, Any]:
    """One line of JSON of a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(pointer_steps.__file__)), *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def recorded(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pointers")
    elsewhere = child("witness", str(folder))["arena"]
    told = child("record", str(folder))
    assert told["arena"] != elsewhere
    return folder, told


@pytest.mark.parametrize("way", pointer_steps.WAYS)
def test_every_way_gives_the_bits_of_the_captured_graphs(
    recorded: Any, way: str, record_property: Record
) -> None:
    folder, before = recorded
    after = child("restore", str(folder), way)
    assert (after["arena"] == before["arena"]) != way.startswith("indirect")
    assert after["kinds"].keys() == before["kinds"].keys()
    for kind, told in after["kinds"].items():
        facts = {name: told[name] for name in ("taken", "from_images", "took_ms")}
        record_property(kind, {**facts, "first_from_image": told["first_from_image"]})
        assert before["kinds"][kind]["prompts_refused"] == "", kind
        assert (told["refused"], told["message"], told["failed"]) == ("", "", ""), kind
        assert (told["ready"], told["proved"]) == (GRAPHS, GRAPHS), kind
        expected = before["kinds"][kind]["captured"]
        differing = [name for name, one in expected.items() if told["found"].get(name) != one]
        assert differing == [], kind
        if way.endswith("trigger"):
            assert told["taken"] > 0, "modules of the first layer have others' kernels"
