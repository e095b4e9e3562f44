"""Chunks from real servers that break off, stall, lie and change."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from msgspec import structs
from sampled_chunks import FILES, IMAGE, KNOWN, ONE, PART, PLAIN, Near
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3, running_s3
from standin_sources import Fault

from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.digests import UNIT_BYTES
from pilotlight.checkpoint.manifest import Manifest
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.common.errors import CorruptChunk, SourceChanged, SourceUnavailable
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.waiting import Backoff
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.model import Model


@pytest.fixture
def model(register) -> Model:
    return register("template").model


PATIENCE = Patience(stall_timeout_s=5.0, tries=8, backoff=Backoff(first_s=0.001, limit_s=0.002))


@contextmanager
def serving() -> Iterator[tuple[StandinS3, Sources]]:
    with running_s3("models") as server:
        server.put("models", "m", FILES)
        settings_of = ModelRootsSettings(
            model_roots="s3://models", s3_endpoint=server.url, s3_allow_http=True
        )
        yield server, Sources(settings_of, PATIENCE)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def s3_model(sources: Sources, template: Model) -> tuple[Model, Manifest]:
    """As the gateway would register it."""
    pinned = sources.pin("s3://models/m")
    checkpoint = read_checkpoint(pinned.source)
    changed = {"uri": pinned.uri, "digest": checkpoint.manifest.digest(), "spec": checkpoint.spec}
    return replace(template, **changed), checkpoint.manifest


@pytest.mark.anyio
async def test_a_server_that_breaks_anywhere_costs_less_than_a_unit_a_break(
    make_node, model: Model, credentials
) -> None:
    rng = random.Random(7)
    with serving() as (server, sources):
        mine, manifest = s3_model(sources, model)
        size_bytes = sum(part.image_bytes for part in manifest.parts)
        for _ in range(6):
            node = make_node(
                open_source=lambda model, manifest: SourceOrigin(
                    sources.open(model.uri), manifest, model.uri
                )
            )
            node.manifests.manifests[mine.digest] = manifest
            server.faults = [
                Fault("", "cut", rng.randrange(3_000_000)) for _ in range(rng.randrange(1, 7))
            ]
            before, breaks = server.sent_bytes, len(server.faults)
            claim = node.copies.claim(mine, range(len(manifest.parts)), ONE, leased=True)
            async with asyncio.timeout(20):
                assert [part.part async for part in node.copies.ready_parts(claim)] == list(
                    range(len(manifest.parts))
                )
            image = node.pool.find(mine.digest, PART)
            with node.pool.view(image, 0, image.image_bytes) as view:
                assert bytes(view) == IMAGE
            assert server.sent_bytes - before <= size_bytes + breaks * UNIT_BYTES
            node.copies.release(claim)


class Replica(SourceOrigin):
    """The files elsewhere, as a peer that need not be trusted."""

    kind = OriginKind.PEER
    trusted = False


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["cut", "stall", "lie", "change", "gone"])
async def test_another_origin_goes_on_where_a_server_fails(
    make_node, model: Model, credentials, fault: str
) -> None:
    with serving() as (near, near_sources), serving() as (far, far_sources):
        mine, manifest = s3_model(far_sources, model)
        known = manifest.with_digests(
            {
                (p, c): chunk.digest
                for p, part in enumerate(KNOWN.parts)
                for c, chunk in enumerate(part.chunks)
                if chunk.digest
            }
        )
        if fault == "lie":
            near.put(
                "models",
                "m",
                {name: data[:-100_000] + bytes(100_000) for name, data in FILES.items()},
            )
        listed = {file.name: file for file in near_sources.open("s3://models/m").list_files()}
        pinned = structs.replace(
            manifest, files=tuple(listed[file.name] for file in manifest.files)
        )
        replica = Replica(near_sources.open("s3://models/m"), pinned, "peer-1")
        if fault in ("cut", "stall"):
            near.faults = [Fault("", fault, 20_000, times=99)]
        elif fault == "change":
            near.put("models", "m", {name: data + b"\0" for name, data in FILES.items()})
        elif fault == "gone":
            near.buckets["models"].clear()
        node = make_node(
            open_source=lambda model, manifest: SourceOrigin(
                far_sources.open(model.uri), manifest, model.uri
            ),
            nearby=[Near(replica)],
            stall_timeout_s=1.0 if fault == "stall" else 10.0,
        )
        node.manifests.manifests[mine.digest] = known
        before = far.sent_bytes
        claim = node.copies.claim(mine, range(len(manifest.parts)), ONE, leased=True)
        async with asyncio.timeout(20):
            assert [part.part async for part in node.copies.ready_parts(claim)] == list(
                range(len(manifest.parts))
            )
        for number, part in enumerate(manifest.parts):
            image = node.pool.find(mine.digest, number)
            with node.pool.view(image, 0, image.image_bytes) as view:
                expected = b"".join(
                    read_chunk(MemorySource(FILES), PLAIN, chunk)
                    for chunk in PLAIN.parts[number].chunks
                )
                assert bytes(view) == expected
            assert part.image_bytes == len(expected)
        code = {"lie": CorruptChunk.code, "change": SourceChanged.code, "gone": SourceChanged.code}
        assert node.seen.failed == [
            (OriginKind.PEER, "peer-1", code.get(fault, SourceUnavailable.code))
        ]
        assert node.tools.distrusted.names == (("peer-1",) if fault == "lie" else ())
        assert far.sent_bytes > before
        near.released.set()
        node.copies.release(claim)
