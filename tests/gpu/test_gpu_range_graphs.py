"""Graphs of a half or a quarter of a model: recorded where the whole model is, restored where the
range alone is, bit for bit; in place, where the range becomes the whole model.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

import ranged_steps
from gpu_builds import built, sessions
from pool_files import pool_file
from step_processes import GRAPHS, Record, last_line_of

from pilotlight.common.messages.codec import decode_json
from pilotlight.policy.coldstart.cuts import usual_ranges
from pilotlight.policy.materialized import Artifact
from pilotlight.policy.model import Dtype

pytestmark = pytest.mark.gpu

child = partial(last_line_of, ranged_steps)
FIRST_HALF, WHOLE = "0-2", "0-4"
RANGES = 5


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Turn and size of each step that gave something else."""
    return [name for name, digest in expected.items() if found.get(name) != digest]


@pytest.fixture(scope="module")
def recorded(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ranges")
    return folder, child("record", str(folder))


def test_captured_steps_of_a_half_or_a_quarter_give_what_eager_ones_do(
    recorded: Any, record_property: Record
) -> None:
    for kind, told in recorded[1].items():
        record_property(kind, told["facts"])
        assert len(told["captured"]) == 1 + RANGES, told["captured"].keys()
        for layers, eager in told["eager"].items():
            assert len(eager) == 2 * GRAPHS
            assert differing(told["captured"][layers], eager) == [], (kind, layers)
            assert told["facts"][layers]["prompts_refused"] == "", (kind, layers)


def test_every_graph_of_a_half_or_a_quarter_gives_the_bits_of_the_captured_one(
    recorded: Any, record_property: Record
) -> None:
    folder, before = recorded
    found = child("restore", str(folder), "ranges")
    assert len(found) == RANGES * len(before)
    for name, told in found.items():
        kind, layers = name.split()
        record_property(name, {"physical_after": told["physical_after"], **told["took_ms"]})
        assert (told["refused"], told["message"], told["failed"]) == ("", "", ""), name
        assert (told["ready"], told["proved"]) == (GRAPHS, GRAPHS), name
        assert differing(told["found"], before[kind]["captured"][layers]) == [], name


def test_a_half_that_becomes_the_whole_model_has_both_graphs_in_place(recorded: Any) -> None:
    """Its own at once and also after it has grown, the whole model's from then on."""
    folder, before = recorded
    for kind, told in child("restore", str(folder), "grown").items():
        captured = before[kind]["captured"]
        assert (told["refused"], told["message"]) == ("", ""), kind
        assert told["before"] == [GRAPHS, GRAPHS], kind
        assert (told["ready"], told["proved"]) == (2 * GRAPHS, 2 * GRAPHS), kind
        for steps, layers in (("ranged", FIRST_HALF), ("found", WHOLE), ("again", FIRST_HALF)):
            assert differing(told[steps], captured[layers]) == [], (kind, steps)


def test_a_half_is_refused_the_graphs_of_the_other_half_by_name(recorded: Any) -> None:
    folder, before = recorded
    (told,) = child("restore", str(folder), "foreign").values()
    assert (told["refused"], told["ready"], told["failed"]) == ("addresses", 0, "")
    expected = before[ranged_steps.KINDS[0]]["captured"]["2-4"]
    assert differing(told["found"], expected) == []


def test_a_half_whose_graph_gives_other_bits_for_its_trial_does_not_use_it(recorded: Any) -> None:
    (told,) = child("restore", str(recorded[0]), "trial").values()
    assert "for its trial, and 0000000000000000 was recorded" in told["failed"], told
    assert (told["found"], told["proved"]) == ({}, 0)


@pytest.mark.anyio
async def test_a_workers_build_records_halves_and_proves_each_where_it_is_alone(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    """Of three layers there are no quarters."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    pool, log_path = pool_file(tmp_path / "pool", "qwen3", Dtype.FLOAT32, 3), tmp_path / "log"
    made = await built(sessions(device.index, pool, log_path), pool, ranges=True)
    artifact, log = decode_json(made.manifest, Artifact), log_path.read_text()[-3000:]
    assert artifact.graphs_refused == "", log
    usual = usual_ranges(pool.model.spec)
    assert [(one.layers, one.refused) for one in artifact.ranges] == [(one, "") for one in usual], (
        log
    )
    assert len(usual) == 2
    for layers in usual:
        found = artifact.graphs_of(layers)
        assert found is not None
        layout, blob = found
        record_property(str(layers), {"archive_bytes": blob.size_bytes, "pool": layout.pool_bytes})
        assert len(layout.digests) == GRAPHS
        assert len(made.archives[blob.digest]) == blob.size_bytes
