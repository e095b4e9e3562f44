"""Stages of groups that are given the graphs of their own range of layers: chosen by the range,
checked byte by byte, restored before those of the whole model.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from artifact_listing import Listing, an_artifact, listing_of, restores, rig_with_graphs
from blake3 import blake3

from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.graphs import (
    GraphsRecorded,
    GraphWays,
    Precomputed,
    RangeFile,
    StageGraphs,
)
from pilotlight.common.messages.hold import Hold
from pilotlight.common.store import artifact_key
from pilotlight.engine.cuda.fitting import GraphsRefused, RestoreNews
from pilotlight.engine.cuda.recording import GraphRecorder, NotRecorded, RecordedGraphs
from pilotlight.policy.cluster import Member
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Digest, InstanceId, NodeId, WorkerId
from pilotlight.policy.materialized import (
    GRAPHS,
    Artifact,
    Blob,
    GraphLayout,
    GraphPlace,
    RangeGraphs,
    Trial,
    range_kind,
)
from pilotlight.policy.model import Model, Stage
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.engine_child.graphs import ArchiveFile, GraphPlans
from pilotlight.worker.engines.options import graph_ways
from pilotlight.worker.found import Found
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.testing import WORKER, MakeRig, Rig

INSTANCE = InstanceId("inst-1")
WHOLE_ARCHIVE = b"archive of the whole model"
LAYOUT = GraphLayout(
    slot=3,
    places=(GraphPlace(name="logits", address=1),),
    pool_bytes=1 << 20,
    trials=(Trial(rows=1, digest="a"),),
)


def archive_of(layers: Stage) -> bytes:
    return b"archive of %d-%d" % (layers.start, layers.stop)


def blob_of(kind: str, data: bytes) -> Blob:
    return Blob(kind=kind, digest=Digest(blake3(data).hexdigest()), size_bytes=len(data))


def with_ranges(model: Model, *ranges: Stage) -> Artifact:
    return an_artifact(
        model,
        graphs=LAYOUT,
        blobs=(
            blob_of(GRAPHS, WHOLE_ARCHIVE),
            *(blob_of(range_kind(layers), archive_of(layers)) for layers in ranges),
        ),
        ranges=tuple(
            RangeGraphs(layers=layers, graphs=replace(LAYOUT, pool_bytes=layers.stop << 20))
            for layers in ranges
        ),
    )


def halves(model: Model) -> tuple[Stage, Stage]:
    return Stage(0, 1), Stage(1, model.spec.num_layers)


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    return await rig_with_graphs(make_rig)


@pytest.fixture
async def listing(rig: Rig, connect_bus: Any) -> Listing:
    made = await listing_of(rig, connect_bus)
    for data in (WHOLE_ARCHIVE, *map(archive_of, halves(rig.model))):
        await made.store.put_if_absent(artifact_key(Digest(blake3(data).hexdigest())), data)
    await made.lists(with_ranges(rig.model, *halves(rig.model)))
    return made


def a_stage(rig: Rig, layers: Stage, device_bytes: int = 0) -> Hold:
    """One of two stages, without memory for more unless it is told."""
    workers = zip((WORKER, WorkerId("other")), halves(rig.model), strict=True)
    members = tuple(
        Member(worker_id=worker, node_id=NodeId(f"node-{worker}"), stage=stage, host="h", port=7)
        for worker, stage in workers
    )
    room = stage_room(rig.model, rig.model.spec.whole).least_bytes - 1
    return msgspec.structs.replace(
        rig.a_hold(), stage=layers, members=members, device_bytes=device_bytes or room
    )


def read(files: tuple[RangeFile, ...]) -> dict[Stage, bytes]:
    return {one.layers: Path(one.path).read_bytes() for one in files}


def artifacts_of(rig: Rig) -> Artifacts:
    assert rig.worker.artifacts is not None
    return rig.worker.artifacts


@pytest.mark.anyio
async def test_a_stage_is_given_the_graphs_of_its_own_range(rig: Rig, listing: Listing) -> None:
    artifacts = artifacts_of(rig)
    for layers in halves(rig.model):
        found = await artifacts.of(a_stage(rig, layers))
        assert found.manifest
        assert (read(found.ranges), found.graphs) == ({layers: archive_of(layers)}, "")
    artifacts.on_graphs(StageGraphs(instance_id=INSTANCE, ready=3))
    assert restores(rig)["graphs", ""] == 1.0


@pytest.mark.anyio
async def test_a_stage_that_may_become_whole_is_given_both(rig: Rig, listing: Listing) -> None:
    first, _ = halves(rig.model)
    found = await artifacts_of(rig).of(a_stage(rig, first, 1 << 40))
    whole = RangeFile(layers=rig.model.spec.whole, path=found.graphs)
    assert read((whole,)) == {whole.layers: WHOLE_ARCHIVE}
    assert read(found.ranges) == {first: archive_of(first)}


@pytest.mark.anyio
async def test_the_whole_model_is_given_no_range(rig: Rig, listing: Listing) -> None:
    found = await artifacts_of(rig).of(rig.a_hold())
    assert found.graphs
    assert found.ranges == ()


@pytest.mark.anyio
@pytest.mark.parametrize("why", ["another range", "off", "another way", "refused when built"])
async def test_a_stage_without_graphs_of_its_range_is_given_nothing(
    rig: Rig, listing: Listing, why: str
) -> None:
    artifacts, (first, rest) = artifacts_of(rig), halves(rig.model)
    if why == "another range":
        await listing.lists(with_ranges(rig.model, rest))
    elif why == "off":
        artifacts._with_graphs = False
    elif why == "another way":
        artifacts._ways = GraphWays(kernels="symbol")
    else:
        made = with_ranges(rig.model, rest)
        refused = RangeGraphs(layers=first, refused="varies")
        await listing.lists(replace(made, ranges=(refused, *made.ranges)))
    assert await artifacts.of(a_stage(rig, first)) == Found()


@pytest.mark.anyio
@pytest.mark.parametrize("place", range(len(archive_of(Stage(0, 1)))))
async def test_one_flipped_byte_of_a_ranges_archive_is_refused_by_name(
    rig: Rig, listing: Listing, place: int
) -> None:
    first, _ = halves(rig.model)
    data = bytearray(archive_of(first))
    data[place] ^= 1
    await replaced(listing, first, bytes(data))
    assert await artifacts_of(rig).of(a_stage(rig, first)) == Found()
    assert restores(rig)["refused", "range_graphs_digest"] == 1.0


@pytest.mark.anyio
async def test_a_ranges_archive_that_was_cut_is_refused_by_name(rig: Rig, listing: Listing) -> None:
    first, _ = halves(rig.model)
    await replaced(listing, first, archive_of(first)[:-1])
    found = await artifacts_of(rig).of(a_stage(rig, first, 1 << 40))
    assert (found.ranges, bool(found.graphs)) == ((), True), "the whole model's is as it was"
    assert restores(rig)["refused", "range_graphs_size"] == 1.0


async def replaced(listing: Listing, layers: Stage, data: bytes) -> None:
    key = artifact_key(blob_of("", archive_of(layers)).digest)
    await listing.store.delete(key)
    await listing.store.put_if_absent(key, data)


@pytest.mark.anyio
@pytest.mark.parametrize("change", ["signature", "digest"])
async def test_a_manifest_whose_ranges_were_changed_is_refused_by_name(
    rig: Rig, listing: Listing, change: str
) -> None:
    """What a range's graphs expect is signed with the rest."""
    first, rest = halves(rig.model)
    info = await listing.lists(with_ranges(rig.model, first, rest))
    data = encode_json(with_ranges(rig.model, first, rest))
    other = data.replace(b'"pool_bytes":1048576', b'"pool_bytes":1048577', 1)
    assert len(other) == len(data)
    assert other != data
    key = artifact_key(info.blob_digest)
    if change == "digest":
        await listing.store.delete(key)
        await listing.store.put_if_absent(key, other)
    else:
        changed = msgspec.structs.replace(info, signature="0" + info.signature[1:])
        listing.found = msgspec.structs.replace(listing.found, artifacts=(changed,))
    assert await artifacts_of(rig).of(a_stage(rig, first)) == Found()
    assert restores(rig)["refused", change] == 1.0


def a_load(model: Model, stage: Stage, ranges: tuple[RangeFile, ...], **changes: Any) -> LoadStage:
    return LoadStage(
        instance_id=INSTANCE,
        model=model,
        stage=stage,
        device_bytes=1 << 20,
        pool_path="/nowhere",
        artifact=encode_json(with_ranges(model, *halves(model))),
        precomputed=Precomputed(ranges=ranges),
        **changes,
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What plans were made of, in order."""
    made: list[dict[str, Any]] = []

    def plan(layout: GraphLayout, read: Any, **options: Any) -> Any:
        made.append({"layout": layout, "read": read, **options})
        return SimpleNamespace(number=len(made) - 1, news=RestoreNews(), uses={})

    monkeypatch.setattr("pilotlight.engine.cuda.restored.RestoredGraphs", plan)
    return made


def test_a_child_restores_the_range_of_its_stage(
    model: Model, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, rest = halves(model)
    (tmp_path / "half").write_bytes(archive_of(rest))
    files = (RangeFile(layers=rest, path=str(tmp_path / "half")),)
    assert GraphPlans().plan_of(a_load(model, rest, files)) is not None
    (one,) = asked
    assert (one["layers"], one["behind"]) == (rest, None)
    assert one["layout"].pool_bytes == rest.stop << 20
    assert one["read"]() == archive_of(rest)
    assert GraphPlans().plan_of(a_load(model, first, files)) is None, "that is another's"


def test_a_child_restores_its_range_before_the_whole_model(
    model: Model, asked: list[dict[str, Any]]
) -> None:
    first, _ = halves(model)
    files = (RangeFile(layers=first, path="/nowhere"),)
    plan = cast("Any", GraphPlans().plan_of(a_load(model, first, files, graphs="/nowhere")))
    whole, half = asked
    assert (whole["later"], half["layers"]) == (True, first)
    assert (half["behind"].number, plan.number) == (0, 1)
    with pytest.raises(GraphsRefused) as refused:
        half["read"]()
    assert refused.value.field == "range_graphs_file"


@pytest.mark.parametrize(
    ("data", "field"),
    [(b"archive of 0-2", "range_graphs_digest"), (b"archive", "range_graphs_size")],
)
def test_a_child_looks_at_every_byte_of_a_ranges_archive(
    tmp_path: Path, data: bytes, field: str
) -> None:
    (tmp_path / "half").write_bytes(data)
    layers = Stage(0, 1)
    file = ArchiveFile(str(tmp_path / "half"), blob_of(range_kind(layers), archive_of(layers)))
    with pytest.raises(GraphsRefused) as refused:
        file.read()
    assert refused.value.field == field


class Recording:
    """Records what may be recorded."""

    def __init__(self, *refused: Stage | None) -> None:
        self.refused = refused
        self.asked: list[Stage | None] = []

    def record(self, layers: Stage | None = None) -> RecordedGraphs:
        self.asked.append(layers)
        if layers in self.refused:
            raise NotRecorded("varies", "other bits")
        return RecordedGraphs(LAYOUT, WHOLE_ARCHIVE if layers is None else archive_of(layers))


def recorded(
    model: Model, monkeypatch: pytest.MonkeyPatch, folder: Path, recording: Recording
) -> GraphsRecorded:
    # Another recorder is made from this one, as it is.
    import_module("pilotlight.engine.cuda.tracing")
    monkeypatch.setattr(
        "pilotlight.engine.cuda.recording.GraphRecorder",
        lambda: cast("GraphRecorder", recording),
    )
    plans = GraphPlans()
    files = tuple(
        RangeFile(layers=one, path=str(folder / range_kind(one))) for one in halves(model)
    )
    load = a_load(model, model.spec.whole, files, record=str(folder / GRAPHS))
    assert plans.plan_of(load) is not None
    came = plans.loaded(INSTANCE)
    assert came is not None
    return came


def test_a_child_records_ranges_behind_the_whole_model(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, rest = halves(model)
    recording = Recording(first)
    came = recorded(model, monkeypatch, tmp_path, recording)
    assert recording.asked == [None, first, rest]
    assert came.blob == blob_of(GRAPHS, WHOLE_ARCHIVE)
    refused, made = came.ranges
    assert (refused.layers, refused.blob, refused.refused) == (first, None, "varies")
    assert (made.layers, made.blob) == (rest, blob_of(range_kind(rest), archive_of(rest)))
    assert made.layout == LAYOUT
    assert (tmp_path / range_kind(rest)).read_bytes() == archive_of(rest)


def test_a_child_records_no_range_where_the_whole_model_is_not_recorded(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recording = Recording(None)
    came = recorded(model, monkeypatch, tmp_path, recording)
    assert (recording.asked, came.refused, came.ranges) == ([None], "varies", ())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"max_stages": 4}, True),
        ({"max_stages": 4, "materialize_ranges": False}, False),
        ({"materialize_ranges": True}, True),
    ],
)
def test_ranges_are_recorded_where_groups_are_switched_on(
    given: dict[str, Any], expected: bool
) -> None:
    settings = WorkerSettings(**given)
    assert settings.with_ranges is expected
    assert graph_ways(settings) == GraphWays()
