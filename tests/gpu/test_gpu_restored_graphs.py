"""Graphs that one process records and another restores: bit for bit, every size, with fresh
inputs and a poisoned pool; or refused by name.
"""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

import restored_steps
from step_processes import GRAPHS, Record, last_line_of

pytestmark = pytest.mark.gpu

child = partial(last_line_of, restored_steps)


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Turn and size of each step that gave something else."""
    return [name for name, digest in expected.items() if found.get(name) != digest]


@pytest.fixture(scope="module")
def recorded(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("graphs")
    return folder, child("record", str(folder))


def test_captured_steps_give_what_eager_ones_do(recorded: Any, record_property: Record) -> None:
    for kind, told in recorded[1].items():
        facts = {name: told[name] for name in ("record_s", "archive_bytes", "pool_bytes")}
        record_property(kind, facts)
        assert len(told["eager"]) == 2 * GRAPHS
        assert told["prompts_refused"] == "", kind
        assert differing(told["captured"], told["eager"]) == [], kind


def test_every_restored_graph_gives_the_bits_of_the_captured_one(
    recorded: Any, record_property: Record
) -> None:
    folder, before = recorded
    for kind, told in child("restore", str(folder), "plain").items():
        facts = {
            name: told[name]
            for name in ("stage_s", "first_s", "all_s", "physical_after", "took_ms")
        }
        record_property(kind, facts)
        assert (told["refused"], told["message"], told["failed"]) == ("", "", ""), kind
        assert (told["ready"], told["proved"]) == (GRAPHS, GRAPHS), kind
        assert differing(told["found"], before[kind]["captured"]) == [], kind


def test_every_launch_list_gives_the_bits_of_the_captured_graph(recorded: Any) -> None:
    """No graph is made before all steps have run: of every size, with fresh inputs and a poisoned
    pool, each after its trial.
    """
    folder, before = recorded
    for kind, told in child("restore", str(folder), "listed").items():
        assert (told["refused"], told["message"], told["failed"]) == ("", "", ""), kind
        assert (told["listed"], told["proved"]) == (GRAPHS, 0), kind
        assert differing(told["found"], before[kind]["captured"]) == [], kind


def test_a_range_that_becomes_the_whole_model_has_the_whole_models_graphs(recorded: Any) -> None:
    """It has run steps of its own layers before, eagerly and captured."""
    folder, before = recorded
    (told,) = child("restore", str(folder), "grown").values()
    assert (told["refused"], told["message"], told["failed"]) == ("", "", "")
    assert (told["ready"], told["proved"]) == (GRAPHS, GRAPHS)
    assert differing(told["found"], before[restored_steps.KINDS[0]]["captured"]) == []


@pytest.mark.parametrize(
    ("way", "field"), [("slot", "slot"), ("cut", "archive"), ("unreadable", "digest")]
)
def test_what_does_not_fit_is_refused_by_name_and_captured(
    recorded: Any, way: str, field: str
) -> None:
    folder, before = recorded
    (told,) = child("restore", str(folder), way).values()
    assert (told["refused"], told["ready"], told["failed"]) == (field, 0, ""), told["message"]
    expected = before[restored_steps.KINDS[0]]["captured"]
    assert differing(told["found"], expected) == []


def test_a_graph_that_gives_other_bits_for_its_trial_is_not_used(recorded: Any) -> None:
    (told,) = child("restore", str(recorded[0]), "trial").values()
    assert "for its trial, and 0000000000000000 was recorded" in told["failed"], told
    assert told["found"] == {}
    assert told["proved"] == 0
