"""Compiled kernels of artifacts: fetched and checked by a worker, restored or recorded by its
engine's child, refused by name otherwise; and what is remembered of graphs that were used.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifact_listing import Listing, an_artifact, listing_of, restores, rig_with_graphs
from blake3 import blake3
from graph_archives import ImageMaker
from manifest_fuzz import MUTATIONS as MANIFESTS
from manifest_fuzz import mutated

from pilotlight.common.errors import RestoreFailed
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.graphs import Precomputed, StageGraphs, StageKernels
from pilotlight.common.store import artifact_key
from pilotlight.common.testing import until
from pilotlight.engine.cuda import kernel_store
from pilotlight.engine.cuda.compiled import Entry, KernelsRefused, pack, unpack
from pilotlight.engine.cuda.kernel_store import KernelStore
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import COMPILE_CACHE, Artifact, Blob, CompiledFor
from pilotlight.policy.model import Model
from pilotlight.worker import artifacts as artifacts_module
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.engine_child import kernels as child_kernels
from pilotlight.worker.engine_child.kernels import KernelPlans
from pilotlight.worker.graph_files import GraphFile
from pilotlight.worker.graph_uses import GraphUses, read_uses
from pilotlight.worker.testing import CLUSTER_KEY, MakeRig, Rig

KEY = "A" * 52
ARCHIVE = pack([Entry(KEY, {"_gemv.json": b"{}", "_gemv.cubin": ImageMaker(["_gemv"]).image()})])
MADE_FOR = CompiledFor(compiler="triton 3.6.0", processor="sm_90", python=".so", libc="2.39")
STAGE = InstanceId("inst-1")
MUTATIONS = MANIFESTS // 5
"""Each writes files."""


def blob_of(data: bytes) -> Blob:
    return Blob(kind=COMPILE_CACHE, digest=Digest(blake3(data).hexdigest()), size_bytes=len(data))


def with_kernels(model: Model, data: bytes = ARCHIVE) -> Artifact:
    return an_artifact(model, blobs=(blob_of(data),), compiled=MADE_FOR)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelStore]:
    """Of a process that has a triton."""
    made = KernelStore()
    monkeypatch.setattr(child_kernels, "_opened", lambda: made)
    monkeypatch.setattr(child_kernels, "_made_for", lambda: MADE_FOR)
    yield made
    made.close()


@pytest.fixture
def file() -> Iterator[GraphFile]:
    made = GraphFile()
    yield made
    made.close()


def a_load(model: Model, artifact: Artifact | bytes = b"", **precomputed: Any) -> LoadStage:
    return LoadStage(
        instance_id=STAGE,
        model=model,
        stage=model.spec.whole,
        device_bytes=1 << 20,
        pool_path="/nowhere",
        artifact=artifact if isinstance(artifact, bytes) else encode_json(artifact),
        precomputed=Precomputed(**precomputed),
    )


def test_a_child_has_an_artifacts_kernels_before_the_stage_has_its_memory(
    model: Model, store: KernelStore, file: GraphFile
) -> None:
    plans = KernelPlans()
    file.write(ARCHIVE)
    plans.begin(a_load(model, with_kernels(model), kernels=file.path))
    assert store.kernel(KEY, "_gemv.json") is not None
    assert not store.only
    (told,) = plans.news()
    assert (told.instance_id, told.restored, told.refused) == (STAGE, 1, "")
    assert plans.news() == []
    assert plans.unloaded(STAGE) is None
    plans.settle(STAGE)
    plans.settle(STAGE)
    assert [one.settled for one in plans.news()] == [True], "told once"
    plans.drop(STAGE)
    assert plans.news() == []
    assert store.kernel(KEY, "_gemv.json") is None, "nobody needs its files any more"


def test_a_stage_with_another_name_keeps_its_kernels_until_it_goes(
    model: Model, store: KernelStore, file: GraphFile
) -> None:
    plans, new = KernelPlans(), InstanceId("inst-new")
    file.write(ARCHIVE)
    plans.begin(a_load(model, with_kernels(model), kernels=file.path))
    plans.news()
    plans.rename(STAGE, new)
    plans.rename(InstanceId("nobody"), InstanceId("other"))
    plans.settle(STAGE)
    assert plans.news() == []
    plans.settle(new)
    assert [(one.instance_id, one.settled) for one in plans.news()] == [(new, True)]
    plans.drop(STAGE)
    assert store.kernel(KEY, "_gemv.json") is not None
    plans.drop(new)
    assert store.kernel(KEY, "_gemv.json") is None


@pytest.mark.parametrize("load", ["plain", "without kernels", "without an archive"])
def test_a_child_leaves_triton_alone_where_there_are_no_kernels(
    model: Model, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    monkeypatch.setattr(child_kernels, "_opened", lambda: pytest.fail("triton was asked for"))
    plans = KernelPlans()
    loads = {
        "plain": a_load(model),
        "without kernels": a_load(model, an_artifact(model), kernels="/x"),
        "without an archive": a_load(model, with_kernels(model)),
    }
    plans.begin(loads[load])
    assert plans.news() == []


BROKEN = b"\x00" + ARCHIVE
WAYS: dict[str, tuple[str, bytes, bytes | None]] = {
    # by field: what is changed, what was signed, what lies there
    "compiler": ("made_for", ARCHIVE, ARCHIVE),
    "libc": ("made_for", ARCHIVE, ARCHIVE),
    "python": ("made_for", ARCHIVE, ARCHIVE),
    "processor": ("made_for", ARCHIVE, ARCHIVE),
    "compile_cache": ("", BROKEN, BROKEN),
    "compile_cache_size": ("", ARCHIVE, ARCHIVE[:-1]),
    "compile_cache_digest": ("", ARCHIVE, ARCHIVE[:-1] + b"x"),
    "compile_cache_file": ("", ARCHIVE, None),
    "files": ("full", ARCHIVE, ARCHIVE),
    "cache_manager": ("elsewhere", ARCHIVE, ARCHIVE),
}


@pytest.mark.parametrize("field", WAYS)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_raised(
    model: Model,
    store: KernelStore,
    file: GraphFile,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
) -> None:
    way, signed, data = WAYS[field]
    artifact = with_kernels(model, signed)
    if way == "made_for":
        artifact = replace(artifact, compiled=replace(MADE_FOR, **{field: "another"}))
    if way == "full":
        monkeypatch.setattr(kernel_store, "_written", raising(OSError(28, "full")))
    if way == "elsewhere":
        monkeypatch.setattr(child_kernels, "_opened", raising(KernelsRefused(field, "redis")))
    if data is not None:
        file.write(data)
    path = file.path if data is not None else "/nonexistent"
    plans = KernelPlans()
    plans.begin(a_load(model, artifact, kernels=path))
    (told,) = plans.news()
    assert (told.refused, told.restored) == (field, 0), told.message
    assert told.message
    assert store.restored == 0


def raising(error: Exception) -> Any:
    def fail(*arguments: object) -> None:
        raise error

    return fail


def test_no_mutation_of_manifest_or_archive_leaves_the_normal_path(
    model: Model, store: KernelStore, file: GraphFile
) -> None:
    """Whatever was signed: a child refuses, or has entries that hold together."""
    good, rng = with_kernels(model), random.Random(86)
    outcomes: dict[str, int] = {}
    for _ in range(MUTATIONS):
        plans, manifest, data = KernelPlans(), encode_json(good), ARCHIVE
        with_archive = rng.random() < 0.5
        if with_archive:
            data = mutated(ARCHIVE, rng)
            manifest = encode_json(with_kernels(model, data))
        else:
            manifest = mutated(manifest, rng)
        archive = GraphFile()
        archive.write(data)
        try:
            plans.begin(a_load(model, manifest, kernels=archive.path))
        except RestoreFailed:
            outcome = "child"
        else:
            told = plans.news()
            outcome = (told[0].refused or "restored") if told else "none"
        finally:
            archive.close()
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        store.close()
    assert outcomes["compile_cache"] > MUTATIONS / 10
    assert outcomes["child"] > MUTATIONS / 20
    assert outcomes["restored"]


def test_kernels_that_do_not_work_are_told_of_once(
    model: Model, store: KernelStore, file: GraphFile
) -> None:
    plans = KernelPlans()
    file.write(ARCHIVE)
    plans.begin(a_load(model, with_kernels(model), kernels=file.path))
    plans.news()
    store.give_up("no such kernel in the image")
    (told,) = plans.news()
    assert (told.refused, told.message) == ("kernels", "no such kernel in the image")
    assert plans.news() == []


def test_a_child_writes_down_what_it_used_when_the_stage_goes(
    model: Model, store: KernelStore, file: GraphFile, tmp_path: Path
) -> None:
    plans = KernelPlans()
    plans.begin(a_load(model, record_kernels=file.path))
    plans.drop(STAGE)
    nothing = plans.unloaded(STAGE)
    assert nothing is not None
    assert (nothing.refused, nothing.blob) == ("unused", None)
    (entry,) = unpack(ARCHIVE)
    store.noting = True
    for name, data in entry.files.items():
        (tmp_path / name).write_bytes(data)
        store.use(KEY, {name: str(tmp_path / name)})
    store.make(KEY, "_gemv.cubin")
    plans.begin(a_load(model, record_kernels=file.path))
    recorded = plans.unloaded(STAGE)
    assert recorded is not None
    assert (recorded.blob, recorded.made_for) == (blob_of(ARCHIVE), MADE_FOR)
    assert recorded.compiled == ("_gemv.cubin",)
    file.seal()
    assert file.read(blob_of(ARCHIVE)) == ARCHIVE
    plans.begin(a_load(model, record_kernels="/nonexistent/place"))
    failed = plans.unloaded(STAGE)
    assert failed is not None
    assert failed.refused == "files"


def test_a_build_is_told_what_an_artifact_lacks(
    model: Model, store: KernelStore, file: GraphFile
) -> None:
    plans = KernelPlans()
    file.write(ARCHIVE)
    plans.begin(a_load(model, with_kernels(model), kernels=file.path, only=True))
    assert store.only
    store.make(KEY, "_add_norm.cubin")
    plans.drop(STAGE)
    said = plans.unloaded(STAGE)
    assert said is not None
    assert (said.compiled, said.refused) == (("_add_norm.cubin",), "")


def bytes_at(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    return await rig_with_graphs(make_rig)


@pytest.fixture
async def listing(rig: Rig, connect_bus: Any) -> Listing:
    return await listing_of(rig, connect_bus)


@pytest.mark.anyio
async def test_kernels_are_fetched_and_what_becomes_of_them_is_counted(
    rig: Rig, listing: Listing
) -> None:
    await listing.lists(with_kernels(rig.model))
    await listing.store.put_if_absent(artifact_key(blob_of(ARCHIVE).digest), ARCHIVE)
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    found = await artifacts.of(rig.a_hold(STAGE))
    assert found.graphs == ""
    assert bytes_at(found.kernels) == ARCHIVE
    artifacts.on_restored(StageKernels(instance_id=STAGE, restored=1))
    artifacts.on_restored(StageKernels(instance_id=InstanceId("another"), restored=1))
    assert restores(rig) == {("found", ""): 1.0, ("kernels", ""): 1.0}
    artifacts.on_restored(StageKernels(instance_id=STAGE, refused="libc"))
    assert restores(rig)["refused", "libc"] == 1.0


@pytest.mark.anyio
@pytest.mark.parametrize("settled", [False, True])
async def test_kernels_with_which_engines_end_are_not_given_to_a_third(
    rig: Rig, listing: Listing, settled: bool
) -> None:
    """Whatever a kernel does to a process, the normal path follows."""
    await listing.lists(with_kernels(rig.model))
    await listing.store.put_if_absent(artifact_key(blob_of(ARCHIVE).digest), ARCHIVE)
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    for number in range(2):
        instance = InstanceId(f"inst-{number}")
        assert (await artifacts.of(rig.a_hold(instance))).kernels
        artifacts.on_restored(StageKernels(instance_id=instance, restored=1))
        if settled:
            artifacts.on_restored(StageKernels(instance_id=instance, settled=True))
        artifacts.on_engine_died("engine_failed")
    found = await artifacts.of(rig.a_hold(InstanceId("inst-2")))
    assert found.manifest
    assert bool(found.kernels) is settled
    assert restores(rig).get(("refused", "engine_died"), 0.0) == (0.0 if settled else 1.0)
    artifacts.forget(an_artifact(rig.model).fingerprint.digest)
    assert (await artifacts.of(rig.a_hold(InstanceId("inst-3")))).kernels, "it was built anew"


@pytest.mark.anyio
async def test_a_start_does_not_wait_long_for_kernels(
    rig: Rig, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts_module, "KERNELS_S", 0.01)
    await listing.lists(with_kernels(rig.model))
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    assert (await artifacts.of(rig.a_hold(STAGE))).kernels == ""
    await until(lambda: not artifacts._fetching)
    assert restores(rig) == {("found", ""): 1.0, ("kernels_late", ""): 1.0}


@pytest.mark.anyio
async def test_what_was_used_is_restored_first_the_next_time_also_by_the_next_worker(
    rig: Rig, listing: Listing, tmp_path: Path
) -> None:
    await listing.lists(with_kernels(rig.model))
    await listing.store.put_if_absent(artifact_key(blob_of(ARCHIVE).digest), ARCHIVE)
    core, digest = rig.worker.core, an_artifact(rig.model).fingerprint.digest
    for number, (told, known) in enumerate(
        [(({1: 8, 16: 1}, {16: 2}), {}), (({16: 100},), {1: 8, 16: 3}), ((), {1: 4, 16: 101})]
    ):
        uses = GraphUses(core.background, tmp_path)
        artifacts = Artifacts(core, listing.store, CLUSTER_KEY, graphs=True, uses=uses)
        instance = InstanceId(f"inst-{number}")
        assert (await artifacts.of(rig.a_hold(instance))).uses == known
        for one in told:
            artifacts.on_restored(StageGraphs(instance_id=instance, uses=one))
        after = await uses.of(digest)
        await until(lambda after=after: read_uses(tmp_path / f"{digest}.json") == after)
        artifacts.close()
