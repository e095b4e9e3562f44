"""Builds on a real NATS server and a real PostgreSQL: one builder each, taken up again, listed at
once or not at all, collected.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from blake3 import blake3
from sqlalchemy import URL, create_engine, delete, insert, select, text, update
from sqlalchemy.pool import NullPool

from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.errors import CallerError, Conflict, CorruptChunk, NotFound
from pilotlight.common.messages.artifacts import (
    ASK_MATERIALS_SUBJECT,
    CLAIM_BUILD_SUBJECT,
    END_BUILD_SUBJECT,
    FIND_ARTIFACTS_SUBJECT,
    FINISH_BUILD_SUBJECT,
    MATERIALIZE_SUBJECT,
    REPORT_BUILD_SUBJECT,
    ArtifactPublished,
    ArtifactsFound,
    AskMaterials,
    BuildClaimed,
    BuildHeard,
    ClaimBuild,
    ClaimedBuild,
    EndBuild,
    FindArtifacts,
    FinishBuild,
    Materialize,
    Materials,
    ReportBuild,
)
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.materializer.coordination import Upkeep
from pilotlight.policy.ids import Digest, WorkerId
from pilotlight.policy.materialized import (
    COMPILE_CACHE,
    GRAPHS,
    MAX_RANGES,
    RANGE_GRAPHS,
    Artifact,
    Blob,
    Canary,
    CompiledFor,
    DecodeTime,
    GraphLayout,
    Layout,
    PrefillTime,
    Profile,
    RangeGraphs,
    range_kind,
)
from pilotlight.policy.model import Stage
from pilotlight.policy.testing import environment, model

pytestmark = pytest.mark.anyio

DEADLINE_S = 5.0
ROOM = 1 << 30
HERE, MODEL = environment(), model("a")
HALF = Stage(0, 2)


@dataclass(kw_only=True)
class Rig:
    """A materializer, and workers and operators that ask it."""

    bus: Bus
    store: ObjectStore
    database: Database
    upkeep: Upkeep

    async def claim(self, worker_id: str = "w1", **changes: Any) -> ClaimedBuild | None:
        message = ClaimBuild(
            worker_id=WorkerId(worker_id),
            environment=environment(**changes),
            room_bytes=ROOM,
        )
        found = await self.bus.request(
            CLAIM_BUILD_SUBJECT, message, BuildClaimed, deadline_s=DEADLINE_S
        )
        return found.build

    async def materialize(self) -> Materials:
        message = Materialize(model=MODEL.name)
        return await self.bus.request(
            MATERIALIZE_SUBJECT, message, Materials, deadline_s=DEADLINE_S
        )

    async def materials(self) -> Materials:
        message = AskMaterials(model=MODEL.name)
        return await self.bus.request(
            ASK_MATERIALS_SUBJECT, message, Materials, deadline_s=DEADLINE_S
        )

    async def report(self, claimed: ClaimedBuild, worker_id: str = "w1", **changes: Any) -> bool:
        message = ReportBuild(
            **{**_of(claimed, worker_id), "step": "load", "share": 0.5, **changes}
        )
        heard = await self.bus.request(
            REPORT_BUILD_SUBJECT, message, BuildHeard, deadline_s=DEADLINE_S
        )
        return heard.yours

    async def end(self, claimed: ClaimedBuild, worker_id: str = "w1", **changes: Any) -> bool:
        message = EndBuild(**{**_of(claimed, worker_id), **changes})
        heard = await self.bus.request(
            END_BUILD_SUBJECT, message, BuildHeard, deadline_s=DEADLINE_S
        )
        return heard.yours

    async def finish(
        self, claimed: ClaimedBuild, worker_id: str = "w1", data: bytes = b"", **changes: Any
    ) -> ArtifactPublished:
        data = data or encode_json(artifact(claimed, **changes))
        digest = Digest(blake3(data).hexdigest())
        await self.report(claimed, worker_id, blobs=(digest,))
        await self.store.put_if_absent(artifact_key(digest), data)
        message = FinishBuild(
            **_of(claimed, worker_id), manifest_digest=digest, size_bytes=len(data)
        )
        return await self.bus.request(
            FINISH_BUILD_SUBJECT, message, ArtifactPublished, deadline_s=DEADLINE_S
        )

    async def set(self, **values: Any) -> None:
        """What time would do."""
        async with self.database.unit_of_work() as work:
            await work.connection.execute(update(tables.builds).values(**values))


def _of(claimed: ClaimedBuild, worker_id: str) -> dict[str, Any]:
    return {
        "fingerprint": claimed.fingerprint.digest,
        "worker_id": WorkerId(worker_id),
        "attempt": claimed.attempt,
    }


def artifact(claimed: ClaimedBuild, **changes: Any) -> Artifact:
    values: dict[str, Any] = {
        "format": 1,
        "fingerprint": claimed.fingerprint,
        "layout": Layout(
            device_bytes=10, parameter_bytes=5, kv_bytes_per_token=1, kv_capacity_tokens=5
        ),
        "profile": Profile(
            load_bytes_per_s=1.0,
            prefill=(PrefillTime(tokens=10, seconds=0.5),),
            decode=(DecodeTime(batch=1, context_tokens=8, seconds=0.1),),
        ),
        "canary": Canary(prompt_ids=(1,), output_ids=(2,)),
        **changes,
    }
    return Artifact(**values)


@pytest.fixture
def owner(module_database: URL) -> Any:
    """The database, as its owner."""
    engine = create_engine(module_database, poolclass=NullPool)
    with engine.begin() as connection:
        names = ("artifacts", "builds", "wants", "profiles", "outbox")
        connection.execute(text("TRUNCATE " + ", ".join(f"materializer.{one}" for one in names)))
        connection.execute(delete(tables.models))
        connection.execute(
            insert(tables.models).values(
                name=MODEL.name,
                digest=MODEL.digest,
                body=to_row_json(MODEL),
                created_at=text("now()"),
                updated_at=text("now()"),
            )
        )
    yield engine
    engine.dispose()


@pytest.fixture
async def rig(running: Any, owner: Any) -> AsyncIterator[Rig]:
    async with running() as (context, application):
        (database,) = [one for one in application.components if isinstance(one, Database)]
        (upkeep,) = [one for one in application.components if isinstance(one, Upkeep)]
        yield Rig(bus=context.bus, store=context.store, database=database, upkeep=upkeep)


async def claimed(rig: Rig) -> ClaimedBuild:
    await rig.materialize()
    one = await rig.claim()
    assert one is not None
    return one


async def test_what_is_asked_for_is_built_by_one_worker_and_listed(rig: Rig) -> None:
    assert await rig.claim() is None
    asked = await rig.materialize()
    assert asked.asked_at
    assert asked.artifacts == ()
    one = await rig.claim()
    assert one is not None
    assert (one.model, one.attempt) == (MODEL, 1)
    assert await rig.claim("w2") is None
    assert await rig.report(one)
    (fact,) = (await rig.materials()).builds
    assert (fact.state, fact.step, fact.share, fact.worker_id) == ("building", "load", 0.5, "w1")
    published = await rig.finish(one)
    found = await rig.materials()
    assert [fact.state for fact in found.builds] == ["built"]
    (listed,) = found.artifacts
    assert listed.made_for == one.fingerprint
    assert listed.prefill_tokens_per_s == 20.0
    message = FindArtifacts(fingerprint=one.fingerprint.digest)
    trusted = await rig.bus.request(
        FIND_ARTIFACTS_SUBJECT, message, ArtifactsFound, deadline_s=DEADLINE_S
    )
    assert trusted.artifacts == (published.artifact,)
    assert await rig.claim() is None
    assert await rig.claim(driver="other") is None, "asked for before it was made"
    async with rig.database.reading() as connection:
        profile = (await connection.execute(select(tables.profiles))).one()
    assert (profile.model, profile.device_kind) == (MODEL.name, "cpu")


async def test_a_stale_artifact_says_what_it_was_made_for(rig: Rig) -> None:
    one = await claimed(rig)
    await rig.finish(one)
    message = FindArtifacts(fingerprint=Digest("0" * 64), model_digest=MODEL.digest)
    found = await rig.bus.request(
        FIND_ARTIFACTS_SUBJECT, message, ArtifactsFound, deadline_s=DEADLINE_S
    )
    assert found == ArtifactsFound(artifacts=(), nearest=one.fingerprint)


async def test_a_silent_builder_loses_its_build_and_lists_nothing(rig: Rig) -> None:
    one = await claimed(rig)
    data = encode_json(artifact(one))
    digest = Digest(blake3(data).hexdigest())
    assert await rig.report(one, blobs=(digest,))
    await rig.store.put_if_absent(artifact_key(digest), data)
    await rig.set(leased_until=text("now() - interval '1 second'"))
    again = await rig.claim("w2")
    assert again is not None
    assert again.attempt == 2
    assert not await rig.report(one)
    assert not await rig.end(one)
    with pytest.raises(Conflict):
        await rig.finish(one)
    assert (await rig.materials()).artifacts == ()
    assert await rig.end(again, "w2", yielded=True)
    await rig.upkeep.once()
    assert not await rig.store.exists(artifact_key(digest)), "what it wrote is gone"
    third = await rig.claim("w3")
    assert third is not None
    assert third.attempt == 3


async def test_upkeep_gives_silent_builds_up(rig: Rig) -> None:
    await claimed(rig)
    await rig.upkeep.once()
    assert [one.state for one in (await rig.materials()).builds] == ["building"]
    await rig.set(leased_until=text("now() - interval '1 second'"))
    await rig.upkeep.once()
    assert [one.state for one in (await rig.materials()).builds] == ["waiting"]


async def test_a_failed_build_waits_until_it_is_asked_for_again(rig: Rig) -> None:
    one = await claimed(rig)
    assert await rig.end(one, code="engine_failed", message="it fell over")
    (fact,) = (await rig.materials()).builds
    assert (fact.state, fact.reason) == ("failed", "engine_failed: it fell over")
    assert await rig.claim() is None
    await rig.materialize()
    again = await rig.claim()
    assert again is not None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"format": 2}, CallerError),
        ({"blobs": (Blob(kind="manifest", digest=Digest("0" * 64), size_bytes=1),)}, CallerError),
        (
            {"blobs": (Blob(kind="range_graphs", digest=Digest("0" * 64), size_bytes=1),)},
            CallerError,
        ),
        ({"blobs": (Blob(kind="graphs", digest=Digest("../x"), size_bytes=1),)}, CallerError),
        ({"blobs": (Blob(kind="graphs", digest=Digest("0" * 64), size_bytes=1),)}, NotFound),
    ],
)
async def test_a_manifest_that_will_not_do_is_not_listed(
    rig: Rig, changes: dict[str, Any], error: type[Exception]
) -> None:
    one = await claimed(rig)
    with pytest.raises(error):
        await rig.finish(one, **changes)
    assert (await rig.materials()).artifacts == ()


async def test_bytes_that_are_no_manifest_are_not_listed(rig: Rig) -> None:
    one = await claimed(rig)
    with pytest.raises(CallerError):
        await rig.finish(one, data=b"{}")
    message = FinishBuild(**_of(one, "w1"), manifest_digest=Digest("0" * 64), size_bytes=3)
    await rig.store.put_if_absent(artifact_key(Digest("0" * 64)), b"abc")
    with pytest.raises(CorruptChunk):
        await rig.bus.request(
            FINISH_BUILD_SUBJECT, message, ArtifactPublished, deadline_s=DEADLINE_S
        )
    assert (await rig.materials()).artifacts == ()


async def test_auto_is_built_for_each_new_environment(rig: Rig, owner: Any) -> None:
    with owner.begin() as connection:
        connection.execute(update(tables.models).values(materialize="auto"))
    one = await rig.claim()
    assert one is not None
    await rig.finish(one)
    assert await rig.claim() is None
    other = await rig.claim(driver="590")
    assert other is not None
    assert other.fingerprint != one.fingerprint


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
