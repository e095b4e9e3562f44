"""What of artifacts goes, from rows and store: of models that are gone, superseded, of builds that
came to nothing.
"""

from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from builds_rig import DEADLINE_S, Rig, claimed
from sqlalchemy import delete, select, text, update

from pilotlight.common.db import tables
from pilotlight.common.errors import CallerError
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    ArtifactsFound,
    FindArtifacts,
)
from pilotlight.common.store import artifact_key
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import (
    COMPILE_CACHE,
    GRAPHS,
    MAX_RANGES,
    RANGE_GRAPHS,
    Blob,
    CompiledFor,
    GraphLayout,
    RangeGraphs,
    range_kind,
)
from pilotlight.policy.model import Stage

pytestmark = pytest.mark.anyio

HALF = Stage(0, 2)


@pytest.mark.parametrize(
    "changed",
    [{"created_at": text("created_at - interval '15 days'")}, {"size_bytes": 9 << 30}],
    ids=["age", "size"],
)
async def test_a_superseded_artifact_goes_by_age_and_by_size(
    rig: Rig, owner: Any, changed: dict[str, Any]
) -> None:
    with owner.begin() as connection:
        connection.execute(update(tables.models).values(materialize="auto"))
    keys: list[str] = []
    for driver in ("580", "590"):
        one = await rig.claim(driver=driver)
        assert one is not None
        keys.append(artifact_key((await rig.finish(one)).artifact.blob_digest))
    await rig.upkeep.once()
    assert [await rig.store.exists(key) for key in keys] == [True, True]
    with owner.begin() as connection:
        connection.execute(update(tables.artifacts).values(**changed))
    await rig.upkeep.once()
    assert [await rig.store.exists(key) for key in keys] == [False, True]


@pytest.mark.parametrize("kind", [GRAPHS, COMPILE_CACHE, range_kind(HALF)])
async def test_blobs_are_listed_signed_and_collected_with_their_manifest(
    rig: Rig, owner: Any, kind: str
) -> None:
    one, data = await claimed(rig), b"archive" * 100
    layout = GraphLayout(slot=3, places=(), pool_bytes=9, trials=())
    made_for = CompiledFor(compiler="triton", processor="sm_90", python=".so", libc="2")
    half = RangeGraphs(layers=HALF, graphs=layout)
    facts: dict[str, Any] = {"ranges": (half,)}
    if not kind.startswith(RANGE_GRAPHS):
        facts = {"graphs": layout} if kind == GRAPHS else {"compiled": made_for}
    blob = Blob(kind=kind, digest=Digest(blake3(data).hexdigest()), size_bytes=len(data))
    assert await rig.report(one, blobs=(blob.digest,) * MAX_RANGES)
    key = artifact_key(blob.digest)
    await rig.store.put_if_absent(key, data)
    for changes in (facts, {"blobs": (blob,)}):
        with pytest.raises(CallerError, match="or neither"):
            await rig.finish(one, **changes)
    large = replace(blob, size_bytes=blob.most_bytes + 1)
    with pytest.raises(CallerError, match="at most"):
        await rig.finish(one, blobs=(large,), **facts)
    await rig.finish(one, blobs=(blob,), **facts)
    message = FindArtifacts(fingerprint=one.fingerprint.digest)
    found = await rig.bus.request(
        FIND_ARTIFACTS_SUBJECT, message, ArtifactsFound, deadline_s=DEADLINE_S
    )
    listed = {info.kind: info.blob_digest for info in found.artifacts}
    assert listed == {"manifest": listed["manifest"], kind: blob.digest}
    await rig.upkeep.once()
    assert await rig.store.exists(key), "what is listed stays"
    with owner.begin() as connection:
        connection.execute(delete(tables.models))
    await rig.upkeep.once()
    assert not await rig.store.exists(key)


async def test_graphs_of_a_build_that_came_to_nothing_are_removed(rig: Rig) -> None:
    one = await claimed(rig)
    graphs = b"graphs" * 100
    digest = Digest(blake3(graphs).hexdigest())
    assert await rig.report(one, blobs=(digest,))
    await rig.store.put_if_absent(artifact_key(digest), graphs)
    await rig.upkeep.once()
    assert await rig.store.exists(artifact_key(digest)), "the build goes on"
    assert await rig.end(one, yielded=True)
    await rig.upkeep.once()
    assert not await rig.store.exists(artifact_key(digest))


async def test_artifacts_of_a_model_that_is_gone_go_with_their_objects(
    rig: Rig, owner: Any
) -> None:
    one = await claimed(rig)
    published = await rig.finish(one)
    key = artifact_key(published.artifact.blob_digest)
    await rig.upkeep.once()
    assert await rig.store.exists(key)
    with owner.begin() as connection:
        connection.execute(delete(tables.models))
    await rig.upkeep.once()
    assert not await rig.store.exists(key)
    async with rig.database.reading() as connection:
        for table in (tables.artifacts, tables.builds, tables.profiles):
            assert (await connection.execute(select(table))).all() == []
