"""Graphs restored by what their addresses point to, and with kernels that the process has loaded:
bit for bit what they give at their addresses, with kernels from images.
"""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

import pointer_steps
from step_processes import GRAPHS, Record, last_line_of

pytestmark = pytest.mark.gpu

child = partial(last_line_of, pointer_steps)


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
        assert before["kinds"][kind]["structures"] == [], kind
        assert (told["refused"], told["message"], told["failed"]) == ("", "", ""), kind
        assert (told["ready"], told["proved"]) == (GRAPHS, GRAPHS), kind
        expected = before["kinds"][kind]["captured"]
        differing = [name for name, one in expected.items() if told["found"].get(name) != one]
        assert differing == [], kind
        if way.endswith("trigger"):
            assert told["taken"] > 0, "modules of the first layer have others' kernels"
