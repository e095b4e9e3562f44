"""Builds on a real NATS server and a real PostgreSQL: one builder each, taken up again, listed at
once or not at all.
"""

import asyncio
from typing import Any

import pytest
from blake3 import blake3
from builds_rig import DEADLINE_S, MODEL, Rig, artifact, claimed, of
from sqlalchemy import select, text, update

from pilotlight.common.db import tables
from pilotlight.common.errors import CallerError, Conflict, CorruptChunk, NotFound
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    FINISH_BUILD_SUBJECT,
    ArtifactPublished,
    ArtifactsFound,
    FindArtifacts,
    FinishBuild,
)
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.store import artifact_key
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import (
    Blob,
)

pytestmark = pytest.mark.anyio


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
    assert (listed.load_bytes_per_s, listed.init_s, listed.restore_s) == (10.0, 1.5, 0.25)
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
    assert [profile.body[name] for name in ("load_s", "init_s", "restore_s")] == [0.5, 1.5, 0.25]


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
    message = FinishBuild(**of(one, "w1"), manifest_digest=Digest("0" * 64), size_bytes=3)
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


async def test_of_claims_at_the_same_moment_one_has_the_build(rig: Rig) -> None:
    await rig.materialize()
    found = await asyncio.gather(*(rig.claim(f"w{number}") for number in range(8)))
    assert [one.attempt for one in found if one is not None] == [1]
