"""What a build does about graphs, with engines that say what they are told to."""

from typing import Any

import pytest
from build_engines import ARCHIVE, BLOB, KERNELS, KERNELS_BLOB, LAYOUT, MADE_FOR, Engines

from pilotlight.common.errors import EngineFailed
from pilotlight.common.errors import RestoreFailed as RestoreFailedError
from pilotlight.common.messages.graphs import (
    GraphsRecorded,
    GraphWays,
    KernelsRecorded,
    StageGraphs,
    StageKernels,
)
from pilotlight.policy.coverage import LoadSeconds
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model
from pilotlight.worker.build_tour import tour

pytestmark = pytest.mark.anyio


async def test_graphs_are_recorded_in_one_engine_and_proved_in_another(model: Model) -> None:
    engines = Engines()
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "graphs kernels"]
    assert engines.read == [ARCHIVE]
    assert built.archives == {BLOB.digest: ARCHIVE, KERNELS_BLOB.digest: KERNELS}
    assert (artifact.graphs, artifact.graphs_refused) == (LAYOUT, "")
    assert artifact.blobs == (KERNELS_BLOB, BLOB)


async def test_its_profile_says_what_loads_without_it_and_with_it_took(model: Model) -> None:
    engines = Engines()
    _, artifact = await engines.build(model)
    profile = artifact.profile
    assert (profile.load_s, profile.init_s) == (2.0, 6.0), "of the engine that loaded it first"
    assert profile.restore_s == 0.25, "of the one that restored it"
    whole = model.device_bytes(model.spec.whole)
    assert profile.model_bytes_per_s(whole) == whole / 2.0


async def test_what_an_engine_does_not_say_is_not_in_the_profile(model: Model) -> None:
    engines = Engines()
    engines.loads_in = engines.restores_in = LoadSeconds()
    _, artifact = await engines.build(model)
    profile = artifact.profile
    assert (profile.load_s, profile.init_s, profile.restore_s) == (0.0, 0.0, 0.0)
    assert profile.model_bytes_per_s(1) == 0.0


async def test_what_addresses_point_to_is_told_by_two_engines(model: Model) -> None:
    """The first one's arena is elsewhere; the second one reads what it recorded."""
    engines = Engines()
    engines.ways = GraphWays(pointers="indirect", kernels="symbol")
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "record", "graphs kernels"]
    assert engines.witnesses == [False, True, False, False]
    assert engines.read == [ARCHIVE, ARCHIVE]
    usual, first, second, proved = engines.told
    assert usual == GraphWays()
    assert first == proved == engines.ways
    assert second.witness != ""
    assert (artifact.graphs, artifact.graphs_refused) == (LAYOUT, "")
    assert built.archives.keys() == {BLOB.digest, KERNELS_BLOB.digest}, "the witness is nobody's"


async def test_without_a_witness_nothing_is_recorded_by_its_name(model: Model) -> None:
    engines = Engines()
    engines.ways = GraphWays(pointers="indirect")
    engines.witnessed = GraphsRecorded(refused="varies", message="other bits")
    _, artifact = await engines.build(model)
    assert engines.loads == ["plain", "record", "kernels"]
    assert (artifact.graphs, artifact.graphs_refused) == (None, "varies")


async def test_an_artifact_has_no_graphs_unless_they_are_wanted(model: Model) -> None:
    engines = Engines()
    engines.graphs = False
    built, artifact = await engines.build(model)
    assert engines.loads == ["plain", "plain"]
    assert (built.archives, artifact.graphs, artifact.graphs_refused) == ({}, None, "")
    assert (artifact.compiled, artifact.compiled_refused) == (None, "")


WAYS: dict[str, dict[str, Any]] = {
    "nodes": {"recorded": GraphsRecorded(refused="nodes", message="a node of type host")},
    "graphs_digest": {"writes": ARCHIVE[:-1] + b"x"},
    "graphs_size": {"writes": ARCHIVE[:-1]},
    "engine": {"recorded": None},
    "engine_failed": {"fails": EngineFailed("the engine of the build was ended")},
    "unproved": {"restored": StageGraphs(instance_id=InstanceId("build"), ready=2, proved=1)},
    "pool": {"restored": StageGraphs(instance_id=InstanceId("build"), refused="pool")},
    "restore_failed": {"proof_fails": RestoreFailedError("the graph of 2 rows gave")},
}


@pytest.mark.parametrize("field", WAYS)
async def test_an_artifact_goes_without_graphs_that_are_not_proved_and_says_why(
    model: Model, field: str
) -> None:
    engines = Engines()
    for name, value in WAYS[field].items():
        setattr(engines, name, value)
    built, artifact = await engines.build(model)
    assert engines.loads[-1] == "kernels", "it is proved without them"
    assert built.archives == {KERNELS_BLOB.digest: KERNELS}
    assert (artifact.graphs, artifact.graphs_refused) == (None, field)
    assert (artifact.blobs, artifact.compiled) == ((KERNELS_BLOB,), MADE_FOR)


async def test_kernels_are_of_a_tour_and_proved_where_there_are_no_others(model: Model) -> None:
    engines = Engines()
    _, artifact = await engines.build(model)
    assert (artifact.compiled, artifact.compiled_refused) == (MADE_FOR, "")
    assert engines.kernels_read == [KERNELS]
    steps = [(*step.prompts, *step.later) for step in tour(model.spec.max_context_tokens, 4096)]
    assert len(steps) > 10
    count, ran = len(steps), engines.batches
    begun = [at for at in range(len(ran)) if ran[at : at + count] == steps]
    assert len(begun) == 2, "before they are written down, and where there are no others"


KERNEL_WAYS: dict[str, dict[str, Any]] = {
    "cache_manager": {"kernels": KernelsRecorded(refused="cache_manager", message="elsewhere")},
    "compile_cache_digest": {"writes_kernels": KERNELS[:-1] + b"x"},
    "compile_cache_size": {"writes_kernels": KERNELS[:-1]},
    "engine": {"kernels": None},
    "engine_failed": {"tour_fails": EngineFailed("a prompt was refused")},
    "libc": {
        "kernels_restored": StageKernels(instance_id=InstanceId("build"), refused="libc"),
    },
    "restore_failed": {"wrong": 8},
}


@pytest.mark.parametrize("field", KERNEL_WAYS)
async def test_an_artifact_goes_without_kernels_that_are_not_proved_and_says_why(
    model: Model, field: str
) -> None:
    engines = Engines()
    for name, value in KERNEL_WAYS[field].items():
        setattr(engines, name, value)
    built, artifact = await engines.build(model)
    assert (artifact.compiled, artifact.compiled_refused) == (None, field)
    assert KERNELS_BLOB.digest not in built.archives
    assert KERNELS_BLOB not in artifact.blobs
    assert "kernels" not in engines.loads[-1]
