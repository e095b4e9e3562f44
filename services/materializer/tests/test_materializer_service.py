"""The materializer on a real NATS server and a real PostgreSQL: artifacts published, found, and not
believed.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from sqlalchemy import URL, create_engine, select, text, update
from sqlalchemy.pool import NullPool
from structlog.testing import capture_logs

from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import (
    BusUnavailable,
    CallerError,
    CorruptChunk,
    DatabaseUnavailable,
    NotFound,
    SettingsInvalid,
)
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    PUBLISH_ARTIFACT_SUBJECT,
    ArtifactInfo,
    ArtifactPublished,
    ArtifactsFound,
    FindArtifacts,
    PublishArtifact,
)
from pilotlight.common.messages.events import EVENT_SUBJECTS, Event
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.materializer.app import Serving, build
from pilotlight.materializer.settings import MaterializerSettings
from pilotlight.policy.ids import Digest

pytestmark = pytest.mark.anyio

DEADLINE_S = 5.0
FINGERPRINT = Digest("ab" * 32)
BLOB = b"a recorded graph"


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A materializer, and a worker that asks it."""

    bus: Bus
    store: ObjectStore
    database: Database
    serving: Serving

    async def put(self, blob: bytes = BLOB) -> Digest:
        """Store a blob as a worker does."""
        digest = Digest(blake3(blob).hexdigest())
        await self.store.put_if_absent(artifact_key(digest), blob)
        return digest

    async def publish(self, blob_digest: Digest, **changes: Any) -> ArtifactInfo:
        """Publish an artifact that is right but for the changes."""
        values: dict[str, Any] = {
            "fingerprint": FINGERPRINT,
            "kind": "graphs",
            "blob_digest": blob_digest,
            "size_bytes": len(BLOB),
            **changes,
        }
        message = PublishArtifact(**values)
        return (
            await self.bus.request(
                PUBLISH_ARTIFACT_SUBJECT, message, ArtifactPublished, deadline_s=DEADLINE_S
            )
        ).artifact

    async def find(self, fingerprint: Digest = FINGERPRINT) -> tuple[ArtifactInfo, ...]:
        """What is found of a fingerprint."""
        message = FindArtifacts(fingerprint=fingerprint)
        return (
            await self.bus.request(
                FIND_ARTIFACTS_SUBJECT, message, ArtifactsFound, deadline_s=DEADLINE_S
            )
        ).artifacts


@pytest.fixture
def settings(
    database_settings: DatabaseSettingsOf, module_database: URL, tmp_path: Path
) -> MaterializerSettings:
    engine = create_engine(module_database, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE materializer.artifacts, materializer.outbox"))
    engine.dispose()
    (tmp_path / "cluster-key").write_text("the cluster's key")
    return MaterializerSettings(
        database_url=database_settings("materializer").database_url, secrets_dir=tmp_path
    )


@pytest.fixture
async def rig(make_context: MakeContext, settings: MaterializerSettings) -> AsyncIterator[Rig]:
    context = make_context("materializer", settings)
    application = await build(context)
    for component in application.components:
        await component.start()
    (database,) = [
        component for component in application.components if isinstance(component, Database)
    ]
    (serving,) = [
        component for component in application.components if isinstance(component, Serving)
    ]
    yield Rig(bus=context.bus, store=context.store, database=database, serving=serving)
    for component in reversed(application.components):
        await component.stop()


async def test_what_is_published_is_found(rig: Rig) -> None:
    events: list[Event] = []

    async def on_event(event: Event) -> None:
        events.append(event)

    listening = await rig.bus.subscribe(EVENT_SUBJECTS, Event, on_event)
    assert await rig.find() == ()
    digest = await rig.put()
    graphs = await rig.publish(digest)
    profile = await rig.publish(digest, kind="profile")
    other = await rig.publish(digest, fingerprint=Digest("cd" * 32))
    assert await rig.find() == (graphs, profile)
    assert await rig.find(Digest("cd" * 32)) == (other,)
    assert len({graphs.signature, profile.signature, other.signature}) == 3
    await until(lambda: len(events) == 3)
    assert (events[0].kind, events[0].entity) == ("artifact_published", FINGERPRINT)
    assert events[0].data == {"kind": "graphs", "blob_digest": digest}
    await listening.end()


async def test_publishing_again_replaces(rig: Rig) -> None:
    first = await rig.publish(await rig.put())
    assert await rig.publish(first.blob_digest) == first
    second = await rig.publish(await rig.put(b"another graph"), size_bytes=len(b"another graph"))
    assert await rig.find() == (second,)


@pytest.mark.parametrize(
    "forged",
    [
        {"signature": "0" * 64},
        {"signature": ""},
        {"signature": "é"},
        {"blob_digest": "0" * 64},
        {"size_bytes": 1},
        {"kind": "compile_cache"},
        {"fingerprint": "cd" * 32},
    ],
)
async def test_a_forged_row_is_not_returned(rig: Rig, forged: dict[str, object]) -> None:
    kept = await rig.publish(await rig.put(), kind="profile")
    await rig.publish(kept.blob_digest)
    async with rig.database.unit_of_work() as work:
        await work.connection.execute(
            update(tables.artifacts).where(tables.artifacts.c.kind == "graphs").values(**forged)
        )
    with capture_logs() as logs:
        assert await rig.find() == (kept,)
        assert await rig.find(Digest("cd" * 32)) == ()
    assert [line["action"] for line in logs] == ["artifact_untrusted"]


async def test_a_signature_of_another_cluster_is_not_believed(
    make_context: MakeContext, settings: MaterializerSettings, rig: Rig, tmp_path: Path
) -> None:
    await rig.publish(await rig.put())
    await rig.serving.stop()
    (tmp_path / "cluster-key").write_text("another cluster's key")
    application = await build(make_context("materializer", settings))
    for component in application.components:
        await component.start()
    assert await rig.find() == ()
    for component in reversed(application.components):
        await component.stop()


async def test_a_blob_that_is_not_what_it_says_is_refused(rig: Rig) -> None:
    digest = await rig.put()
    with pytest.raises(CorruptChunk, match=digest):
        await rig.publish(digest, size_bytes=len(BLOB) + 1)
    wrong = Digest("12" * 32)
    await rig.store.put_if_absent(artifact_key(wrong), BLOB)
    with pytest.raises(CorruptChunk, match=wrong):
        await rig.publish(wrong)
    with pytest.raises(NotFound, match="34"):
        await rig.publish(Digest("34" * 32))
    assert await rig.find() == ()
    async with rig.database.reading() as connection:
        assert (await connection.execute(select(tables.outboxes["materializer"]))).all() == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"kind": "pickle"}, "pickle"),
        ({"kind": ""}, "kind"),
        ({"fingerprint": "short"}, "fingerprint"),
        ({"fingerprint": "AB" * 32}, "fingerprint"),
        ({"blob_digest": "../" * 21 + "x"}, "blob_digest"),
        ({"blob_digest": "\0" * 64}, "blob_digest"),
    ],
)
async def test_malformed_requests_are_refused(
    rig: Rig, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(CallerError, match=param):
        await rig.publish(**{"blob_digest": Digest("0" * 64), **changes})
    with pytest.raises(CallerError, match="fingerprint"):
        await rig.find(Digest("x"))


async def test_it_serves_once_however_often_it_is_started(rig: Rig) -> None:
    await rig.serving.start()
    await rig.serving.stop()
    with pytest.raises(BusUnavailable):
        await rig.find()
    await rig.serving.stop()
    await rig.serving.start()
    assert await rig.find() == ()


async def test_an_outage_of_the_database_is_told(rig: Rig, module_database: URL) -> None:
    engine = create_engine(
        module_database.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )
    ends = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
    with engine.connect() as connection:
        connection.execute(
            text(f"ALTER DATABASE {module_database.database} WITH ALLOW_CONNECTIONS false")
        )
        connection.execute(ends, {"name": module_database.database})
        try:
            with pytest.raises(DatabaseUnavailable):
                await rig.find()
        finally:
            connection.execute(
                text(f"ALTER DATABASE {module_database.database} WITH ALLOW_CONNECTIONS true")
            )
    engine.dispose()
    assert await rig.find() == ()


async def test_without_the_clusters_key_there_is_no_materializer(
    make_context: MakeContext, settings: MaterializerSettings, tmp_path: Path
) -> None:
    (tmp_path / "cluster-key").unlink()
    with pytest.raises(SettingsInvalid, match="cluster-key"):
        await build(make_context("materializer", settings))
