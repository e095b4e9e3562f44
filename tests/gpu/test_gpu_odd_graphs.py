"""Graphs that do what no model's do here: numbers drawn, functions called on the host, and buffers
that one captured step fills for all others. What cannot be restored is refused by name where it is
recorded; MEDUSA's permanent buffers come with their contents.
"""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

import odd_steps
from step_processes import Record, last_line_of

pytestmark = pytest.mark.gpu

child = partial(last_line_of, odd_steps)
GRAPHS = len(odd_steps.ROWS) + len(odd_steps.LENGTHS)


@pytest.mark.parametrize(
    ("way", "field", "says"),
    [
        ("draws", "nodes", "draws random numbers"),
        ("calls", "nodes", "host"),
        ("keeps", "permanent", "need what lies in the graph pool"),
    ],
)
def test_what_another_process_cannot_have_is_refused_by_name(
    device: torch.device, way: str, field: str, says: str
) -> None:
    told = child("refused", way)
    assert (told["field"], says in told["message"]) == (field, True), told


@pytest.fixture(scope="module")
def recorded(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("odd")
    child("witness", str(folder))
    return folder, child("record", str(folder))


def test_a_permanent_buffer_comes_with_its_contents(recorded: Any, record_property: Record) -> None:
    """Elsewhere in another process, the graph pool full of nonsense."""
    folder, before = recorded
    record_property("contents", before["contents"])
    assert before["prompts_refused"] == ""
    assert len(before["contents"]) >= 1
    assert not any(before["given_back"])
    told = child("restore", str(folder))
    assert (told["refused"], told["failed"]) == ("", ""), told
    assert (told["ready"], told["proved"]) == (GRAPHS, GRAPHS)


def test_without_these_a_graph_gives_other_bits_and_is_not_used(recorded: Any) -> None:
    told = child("restore", str(recorded[0]), "bare")
    assert "for its trial" in told["failed"], told
    assert told["proved"] < GRAPHS
