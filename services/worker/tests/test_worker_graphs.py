"""Graphs of artifacts in a worker: fetched and checked, kept in sealed memory, told to the engine's
child; refused by name otherwise.
"""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from artifact_listing import Listing, an_artifact, listing_of, restores, rig_with_graphs
from blake3 import blake3
from manifest_fuzz import MUTATIONS, mutated
from restored_rig import DEADLINE_S, RestoredRig

from pilotlight.common.errors import RestoreFailed
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.events import EVENT_SUBJECTS, Event
from pilotlight.common.messages.graphs import Precomputed, StageGraphs
from pilotlight.common.store import artifact_key
from pilotlight.common.testing import until
from pilotlight.engine.cuda.fitting import GraphsRefused, RestoreNews
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import GRAPHS, Artifact, Blob, GraphLayout, GraphPlace, Trial
from pilotlight.policy.model import Model
from pilotlight.worker import artifacts as artifacts_module
from pilotlight.worker.engine_child.graphs import ArchiveFile, GraphPlans
from pilotlight.worker.graph_files import GraphFile, GraphFiles, WrongArchive
from pilotlight.worker.testing import MakeRig, Rig

ARCHIVE = bytes(range(256)) * 40
LAYOUT = GraphLayout(
    slot=3,
    places=(GraphPlace(name="logits", address=1),),
    pool_bytes=1 << 20,
    trials=(Trial(rows=1, digest="a"),),
)


def blob_of(data: bytes) -> Blob:
    return Blob(kind=GRAPHS, digest=Digest(blake3(data).hexdigest()), size_bytes=len(data))


BLOB = blob_of(ARCHIVE)


def with_graphs(model: Model, blob: Blob = BLOB) -> Artifact:
    return an_artifact(model, blobs=(blob,), graphs=LAYOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBefore:
    """As releases without graphs of prompts know it."""

    slot: int
    places: tuple[GraphPlace, ...]
    pool_bytes: int
    trials: tuple[Trial, ...]


def test_releases_with_and_without_graphs_of_prompts_read_each_others_layouts() -> None:
    """Of such an archive the one without says that it has other sizes than were recorded."""
    digest = "b" * 64
    now = replace(LAYOUT, prompts=(Trial(rows=16, digest=digest),), prompts_refused="varies")
    before = decode_json(encode_json(now), LayoutBefore)
    assert before.trials == LAYOUT.trials
    assert decode_json(encode_json(before), GraphLayout) == LAYOUT
    assert now.digests == {1: "a", prompt_size(16): digest}


def test_a_file_has_no_name_is_read_by_the_child_and_never_changed() -> None:
    file = GraphFile()
    file.write(ARCHIVE)
    program = f"import sys; sys.stdout.buffer.write(open({file.path!r}, 'rb').read())"
    read = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert read.stdout == ARCHIVE
    for mode in ("r+b", "wb"):
        with pytest.raises(OSError, match=r"denied|permitted"), open(file.path, mode) as other:
            other.write(b"x")
    assert file.read(BLOB) == ARCHIVE
    file.close()
    file.close()


@pytest.mark.parametrize(
    ("data", "field"), [(ARCHIVE[:-1], "graphs_size"), (ARCHIVE[:-1] + b"x", "graphs_digest")]
)
def test_bytes_that_are_not_an_archives_are_refused_by_name(data: bytes, field: str) -> None:
    files, file = GraphFiles(), GraphFile()
    with pytest.raises(WrongArchive, match=field):
        files.keep(BLOB, data)
    assert files.path_of(BLOB) == ""
    file.write(data)
    with pytest.raises(WrongArchive, match=field):
        file.read(BLOB)
    read = ArchiveFile(file.path, BLOB).read
    with pytest.raises(GraphsRefused) as refused:
        read()
    assert refused.value.field == field


def test_one_bit_of_any_byte_of_an_archive_refuses_it() -> None:
    files = GraphFiles()
    for place in range(len(ARCHIVE)):
        changed = bytearray(ARCHIVE)
        changed[place] ^= 1 << place % 8
        with pytest.raises(WrongArchive, match="graphs_digest"):
            files.keep(BLOB, bytes(changed))
    assert files.path_of(BLOB) == ""


def test_a_file_that_is_gone_is_refused_by_name() -> None:
    file = GraphFile()
    file.write(ARCHIVE)
    path = file.path
    open_yet = ArchiveFile(path, BLOB)
    file.close()
    assert open_yet.read() == ARCHIVE, "what is open stays"
    with pytest.raises(GraphsRefused) as refused:
        ArchiveFile(path, BLOB).read()
    assert refused.value.field == "graphs_file"


def test_the_archives_that_were_used_last_are_kept() -> None:
    archives = [bytes([number]) * 1000 for number in range(4)]
    blobs = [blob_of(data) for data in archives]
    files = GraphFiles(most_bytes=3000)
    for blob, data in zip(blobs[:3], archives[:3], strict=True):
        files.keep(blob, data)
    assert files.path_of(blobs[0])
    files.keep(blobs[3], archives[3])
    assert [bool(files.path_of(blob)) for blob in blobs] == [True, False, True, True]
    assert files.num_bytes == 3000
    files.keep(blob_of(ARCHIVE), ARCHIVE)
    assert files.path_of(blob_of(ARCHIVE)), "one that is larger than all of the room"
    before = len(os.listdir("/proc/self/fd"))
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert files.num_bytes == 0


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    return await rig_with_graphs(make_rig)


@pytest.fixture
async def listing(rig: Rig, connect_bus: Any) -> Listing:
    return await listing_of(rig, connect_bus)


async def found(rig: Rig, instance: str = "inst-1") -> bytes | None:
    """What an engine would read; None where a start has no graphs."""
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    path = (await artifacts.of(rig.a_hold(instance))).graphs
    return bytes_at(path) if path else None


def bytes_at(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.anyio
async def test_graphs_are_fetched_once_and_their_way_is_counted(rig: Rig, listing: Listing) -> None:
    await listing.lists(with_graphs(rig.model))
    await listing.store.put_if_absent(artifact_key(BLOB.digest), ARCHIVE)
    assert await found(rig) == ARCHIVE
    await listing.store.delete(artifact_key(BLOB.digest))
    assert await found(rig, "inst-2") == ARCHIVE
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    for ready in (0, 1, 2):
        artifacts.on_graphs(StageGraphs(instance_id=InstanceId("inst-2"), ready=ready))
    artifacts.on_graphs(StageGraphs(instance_id=InstanceId("another"), ready=1))
    assert restores(rig) == {("found", ""): 2.0, ("graphs", ""): 1.0}


@pytest.mark.anyio
async def test_graphs_that_the_engine_refuses_are_counted_and_told_by_name(
    rig: Rig, listing: Listing
) -> None:
    events: list[Event] = []

    async def on_event(event: Event) -> None:
        events.append(event)

    await rig.bus.subscribe(EVENT_SUBJECTS, Event, on_event)
    await listing.lists(with_graphs(rig.model))
    await listing.store.put_if_absent(artifact_key(BLOB.digest), ARCHIVE)
    assert await found(rig) == ARCHIVE
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    for _ in range(2):
        told = StageGraphs(instance_id=InstanceId("inst-1"), refused="slot", message="5, not 3")
        artifacts.on_graphs(told)
    assert restores(rig)["refused", "slot"] == 1.0
    await until(lambda: events)
    assert (events[0].kind, events[0].data["field"]) == ("restore_refused", "slot")
    assert events[0].data["model"] == rig.model.name


@pytest.mark.anyio
@pytest.mark.parametrize("data", [ARCHIVE[:-1], ARCHIVE[:-1] + b"x"])
async def test_graphs_that_are_not_what_was_signed_are_refused_and_the_start_is_without_them(
    rig: Rig, listing: Listing, data: bytes
) -> None:
    await listing.lists(with_graphs(rig.model))
    await listing.store.put_if_absent(artifact_key(BLOB.digest), data)
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    field = "graphs_size" if len(data) < len(ARCHIVE) else "graphs_digest"
    counts = restores(rig)
    assert (counts["refused", field], counts["graphs_late", ""], counts["found", ""]) == (1, 1, 1)


@pytest.mark.anyio
async def test_a_start_does_not_wait_for_graphs_that_are_slow_and_the_next_one_has_them(
    rig: Rig, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await listing.lists(with_graphs(rig.model))
    await listing.store.put_if_absent(artifact_key(BLOB.digest), ARCHIVE)
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    may, get, asked = asyncio.Event(), listing.store.get, 0

    async def slowly(key: str) -> bytes:
        nonlocal asked
        if key == artifact_key(BLOB.digest):
            asked += 1
            await may.wait()
        return await get(key)

    monkeypatch.setattr(artifacts._store, "get", slowly)
    monkeypatch.setattr(artifacts_module, "GRAPHS_S", 0.01)
    assert await found(rig) is None
    assert await found(rig, "inst-2") is None
    assert asked == 1, "one fetch for all"
    may.set()
    await until(lambda: not artifacts._fetching)
    assert await found(rig, "inst-3") == ARCHIVE
    assert restores(rig)["graphs_late", ""] == 2.0


@pytest.mark.anyio
async def test_graphs_are_left_alone_unless_they_are_wanted(rig: Rig, listing: Listing) -> None:
    assert rig.worker.artifacts is not None
    rig.worker.artifacts._with_graphs = False
    await listing.lists(with_graphs(rig.model))
    await listing.store.put_if_absent(artifact_key(BLOB.digest), ARCHIVE)
    assert await found(rig) is None
    assert restores(rig) == {("found", ""): 1.0}


def a_load(model: Model, **changes: Any) -> LoadStage:
    return LoadStage(
        instance_id=InstanceId("inst-1"),
        model=model,
        stage=model.spec.whole,
        device_bytes=1 << 20,
        pool_path="/nowhere",
        **changes,
    )


def test_a_child_plans_graphs_only_where_there_are_some(model: Model) -> None:
    plans = GraphPlans()
    plain, good = encode_json(an_artifact(model)), encode_json(with_graphs(model))
    assert plans.plan_of(a_load(model)) is None
    assert plans.plan_of(a_load(model, artifact=plain, graphs="/x")) is None
    assert plans.plan_of(a_load(model, artifact=good)) is None
    assert isinstance(plans.plan_of(a_load(model, artifact=good, graphs="/x")), RestoredGraphs)


@pytest.mark.parametrize("wanted", [False, True])
def test_steps_are_launched_without_their_graphs_where_that_is_wanted(
    model: Model, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "pilotlight.engine.cuda.restored.RestoredGraphs",
        lambda layout, read, **others: asked.append(others["launch_lists"]),
    )
    load = a_load(
        model,
        artifact=encode_json(with_graphs(model)),
        graphs="/x",
        precomputed=Precomputed(launch_lists=wanted),
    )
    GraphPlans().plan_of(load)
    assert asked == [wanted]


@pytest.mark.anyio
@pytest.mark.parametrize("wanted", [False, True])
async def test_a_start_says_whether_steps_wait_for_graphs(rig: Rig, wanted: bool) -> None:
    artifacts, sent = rig.worker.artifacts, list[LoadStage]()
    assert artifacts is not None
    artifacts.launch_lists = wanted
    load_stage = rig.worker.core.engine.load_stage

    async def seen(load: LoadStage, *others: Any) -> None:
        sent.append(load)
        await load_stage(load, *others)

    rig.worker.core.engine.load_stage = seen
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    assert [load.precomputed.launch_lists for load in sent] == [wanted]


def test_no_mutation_of_a_manifest_plans_what_it_does_not_say(model: Model) -> None:
    """Nothing is read and nothing is asked of a device before a stage has its memory."""
    data, rng, planned, refused = encode_json(with_graphs(model)), random.Random(20), 0, 0
    for _ in range(MUTATIONS):
        plans = GraphPlans()
        changed = mutated(data, rng)
        try:
            plan = plans.plan_of(a_load(model, artifact=changed, graphs="/nonexistent"))
        except RestoreFailed:
            refused += 1
            continue
        planned += plan is not None
        assert plan is None or cast("RestoredGraphs", plan).news == RestoreNews()
    assert planned + refused > 0.9 * MUTATIONS
    assert min(planned, refused) > MUTATIONS / 100, "both ways are tried"


def test_a_child_tells_what_becomes_of_graphs_when_it_changes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = RestoredRig()
    monkeypatch.setattr(
        "pilotlight.engine.cuda.restored.RestoredGraphs",
        lambda layout, read, **others: rig.begin(),
    )
    plans = GraphPlans()
    artifact = replace(with_graphs(model), graphs=rig.layout)
    plans.plan_of(a_load(model, artifact=encode_json(artifact), graphs="/x"))
    assert plans.news() == []
    rig.device.go(1)
    wait_for(lambda: rig.plan is not None and rig.plan.news.ready == 1)
    (told,) = plans.news()
    assert (told.instance_id, told.ready, told.proved, told.refused) == ("inst-1", 1, 0, "")
    assert plans.news() == []
    assert rig.supply(1) is not None
    assert [one.proved for one in plans.news()] == [1]
    plans.drop(InstanceId("inst-1"))
    rig.end()
    assert plans.news() == []


def wait_for(reached: Callable[[], bool]) -> None:
    async def wait() -> None:
        await until(reached, deadline_s=DEADLINE_S)

    asyncio.run(wait())
