"""What a build does about graphs of ranges, with engines that say what they are told to."""

from dataclasses import replace

import msgspec
import pytest
from build_engines import ARCHIVE, BLOB, KERNELS_BLOB, LAYOUT, Engines

from pilotlight.common.errors import EngineFailed, PilotlightError, RestoreFailed
from pilotlight.common.messages.graphs import GraphsRecorded, GraphWays, RangeRecorded, StageGraphs
from pilotlight.policy.coldstart.cuts import usual_ranges
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.materialized import RangeGraphs, range_kind
from pilotlight.policy.model import Model, Stage

pytestmark = pytest.mark.anyio

BUILD = InstanceId("build")


def ranged(model: Model) -> tuple[Engines, Model, tuple[Stage, ...]]:
    """Engines of a build that is to have ranges; of a model with a layer for each quarter."""
    spec = replace(model.spec, num_layers=4, part_bytes=(10,) * 6)
    deep, engines = replace(model, spec=spec), Engines()
    usual = usual_ranges(spec)
    engines.ranges = True
    recorded = tuple(map(engines.records, usual))
    engines.recorded = GraphsRecorded(layout=LAYOUT, blob=BLOB, ranges=recorded)
    return engines, deep, usual


def names(ranges: tuple[Stage, ...]) -> list[str]:
    return [f"{one.start}-{one.stop}" for one in ranges]


async def test_halves_and_quarters_are_recorded_with_the_whole_model_and_proved_alone(
    model: Model,
) -> None:
    engines, deep, usual = ranged(model)
    built, artifact = await engines.build(deep)
    assert names(usual) == ["0-2", "2-4", "0-1", "1-2", "2-3", "3-4"]
    assert engines.loads == ["plain", "record", "graphs kernels", *names(usual)]
    assert artifact.ranges == tuple(RangeGraphs(layers=one, graphs=LAYOUT) for one in usual)
    for layers in usual:
        found = artifact.graphs_of(layers)
        assert found is not None
        assert built.archives[found[1].digest] == engines.writes_range(layers)
    assert built.archives[BLOB.digest] == ARCHIVE
    assert len(built.archives) == 2 + len(usual)
    assert artifact.wrong_ranges() == ""
    assert engines.starts == 4, "one engine proves one range after the other"


async def test_ranges_are_not_recorded_unless_they_are_wanted(model: Model) -> None:
    engines, deep, _ = ranged(model)
    engines.ranges = False
    built, artifact = await engines.build(deep)
    assert (artifact.ranges, artifact.blobs) == ((), (KERNELS_BLOB, BLOB))
    assert len(built.archives) == 2


@pytest.mark.parametrize("without", ["gpu", "graphs", "usual"])
async def test_what_has_no_graphs_of_its_own_in_the_usual_way_has_none_of_ranges(
    model: Model, without: str
) -> None:
    engines, deep, _ = ranged(model)
    if without == "gpu":
        engines.on_gpu = False
    elif without == "graphs":
        engines.graphs = False
    else:
        engines.ways = GraphWays(kernels="symbol")
    _, artifact = await engines.build(deep)
    assert artifact.ranges == ()
    assert all("-" not in one for one in engines.loads)


WRONG: dict[str, StageGraphs | PilotlightError] = {
    "unproved": StageGraphs(instance_id=BUILD, ready=2, proved=1),
    "addresses": StageGraphs(instance_id=BUILD, refused="addresses"),
    "restore_failed": RestoreFailed("the graph of 2 rows gave"),
    "engine_failed": EngineFailed("the engine of the build was ended"),
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_range_that_is_not_proved_is_left_out_by_name_and_the_others_stay(
    model: Model, field: str
) -> None:
    engines, deep, usual = ranged(model)
    engines.ranges_restored[usual[1]] = WRONG[field]
    built, artifact = await engines.build(deep)
    assert engines.loads[3:] == names(usual), "each was tried once"
    assert engines.starts == 5, "the engine that refused one is not asked for another"
    assert artifact.ranges[1] == RangeGraphs(layers=usual[1], refused=field)
    assert artifact.graphs_of(usual[1]) is None
    assert all(artifact.graphs_of(one) is not None for one in (usual[0], *usual[2:]))
    assert engines.writes_range(usual[1]) not in built.archives.values()
    assert (artifact.graphs, artifact.wrong_ranges()) == (LAYOUT, "")


async def test_a_range_that_is_not_recorded_is_left_out_by_name(model: Model) -> None:
    engines, deep, usual = ranged(model)
    recorded = engines.recorded
    assert recorded is not None
    refused = RangeRecorded(layers=usual[0], refused="varies", message="other bits")
    others = list(recorded.ranges[2:])
    assert others[0].blob is not None
    cut = replace(others[0].blob, size_bytes=others[0].blob.size_bytes + 1)
    others[0] = msgspec.structs.replace(others[0], blob=cut)
    engines.recorded = msgspec.structs.replace(recorded, ranges=(refused, *others))
    _, artifact = await engines.build(deep)
    said = {one.layers: one.refused for one in artifact.ranges}
    assert said == dict.fromkeys(usual, "") | {
        usual[0]: "varies",
        usual[1]: "engine",
        usual[2]: "range_graphs_size",
    }
    assert {one.kind for one in artifact.blobs[2:]} == {range_kind(one) for one in usual[3:]}


async def test_ranges_go_with_the_whole_models_graphs(model: Model) -> None:
    """They are tried on a device on which those were not right."""
    engines, deep, usual = ranged(model)
    engines.restored = StageGraphs(instance_id=BUILD, ready=2, proved=1)
    built, artifact = await engines.build(deep)
    assert (artifact.graphs, artifact.graphs_refused) == (None, "unproved")
    assert [one.refused for one in artifact.ranges] == ["unproved"] * len(usual)
    assert artifact.blobs == (KERNELS_BLOB,)
    assert built.archives.keys() == {KERNELS_BLOB.digest}
