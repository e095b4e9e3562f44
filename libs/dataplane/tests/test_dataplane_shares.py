"""What is said of a transfer: whose bytes it has, how fast they come, and what its links give."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.checkpoint.digests import UNIT_BYTES, chunk_digest, unit_digests
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.common.errors import SourceUnavailable
from pilotlight.common.messages.spans import SpanBatch, SpanRecord
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.telemetry import start_telemetry, stop_telemetry
from pilotlight.common.testing import until
from pilotlight.dataplane.chunk_fill import ChunkFill, ChunkWork, WrongBytes
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.dataplane.shares import SAMPLE_S, Rate
from pilotlight.policy.cluster import FetchPriority, OriginKind
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SIZE_BYTES = 3 * UNIT_BYTES + 7
BYTES = bytes(range(251)) * (SIZE_BYTES // 251 + 1)
CHUNK = BYTES[:SIZE_BYTES]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, SIZE_BYTES), st.booleans()), max_size=6
    ),
    st.booleans(),
)
def test_shares_add_up_to_what_is_there_whoever_breaks_off_or_lies(
    tries: list[tuple[str, int, bool]], listed: bool
) -> None:
    placed = bytearray(SIZE_BYTES)
    owners = bytearray()

    def place(offset: int, data: memoryview) -> None:
        placed[offset : offset + len(data)] = data

    fill = ChunkFill(chunk_digest(CHUNK), SIZE_BYTES, place)
    for origin, count, lies in (*tries, ("z", SIZE_BYTES, False)):
        work = fill.begin(origin, ReadProgress())
        try:
            if listed:
                work.expect(unit_digests(CHUNK))
            start = work.position
            del owners[start:]
            piece = bytearray(CHUNK[start : start + count])
            if lies and piece:
                piece[0] ^= 1
            work.write(piece)
        except WrongBytes:
            pass
        # As each byte tells it: what was taken back counts for no origin.
        del owners[fill.received_bytes :]
        owners += origin.encode() * (fill.received_bytes - len(owners))
        assert fill.shares == {
            name: owners.count(name.encode()) for name in "abcz" if name.encode() in owners
        }
        assert sum(fill.shares.values()) == fill.received_bytes
        if fill.is_whole:
            return


def test_a_rate_is_what_came_lately() -> None:
    rate = Rate(10.0)
    assert rate.of(0, 10.0) is None
    assert rate.of(500, 10.0 + SAMPLE_S / 2) is None, "too little time to say"
    assert rate.of(1000, 11.0) == 1000
    assert rate.of(1100, 11.1) == 1000
    assert rate.of(4000, 12.0) == 2000, "the mean of what was known and the newest"
    assert rate.of(3000, 13.0) == 1000, "bytes that were wrong are taken back, and none came"


class Halting:
    """A node that gives half of each chunk and breaks off, or all of it, when the test lets it."""

    kind = OriginKind.PEER
    trusted = False
    link = "peer://near"
    name = "near"

    def __init__(self, folder: Any, whole: bool) -> None:
        self._folder = folder
        self._whole = whole

    def origins(self, model: Model, manifest: Manifest) -> Sequence[Any]:
        return [self]

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        until_byte = chunk.size_bytes if self._whole else chunk.size_bytes // 2
        data = bytearray()
        for segment in chunk.segments:
            with (self._folder / self._files[segment.file]).open("rb") as file:
                file.seek(segment.file_offset)
                data.extend(bytes(segment.image_offset - chunk.image_offset - len(data)))
                data.extend(file.read(segment.size_bytes))
        data.extend(bytes(chunk.size_bytes - len(data)))
        work.write(data[work.position : until_byte])
        if not self._whole:
            raise SourceUnavailable("the link is gone")

    def of(self, manifest: Manifest) -> "Halting":
        self._files = [file.name for file in manifest.files]
        return self


class Sink:
    """A bus that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    async def publish(self, subject: str, message: object, *, binary: bool = False) -> None:
        assert isinstance(message, SpanBatch)
        self.spans += message.spans


@pytest.fixture
async def sink(anyio_backend: str) -> AsyncGenerator[Sink]:
    made = Sink()
    start_telemetry("loader", ServiceSettings(), made)
    yield made
    await stop_telemetry()
    structlog.reset_defaults()


@pytest.mark.anyio
@pytest.mark.parametrize("whole", [False, True])
async def test_a_transfer_says_whose_bytes_it_has(
    make_node, register, sink: Sink, whole: bool
) -> None:
    known = register()
    digests = await _digests_of(make_node, known)
    near = Halting(known.folder, whole).of(known.manifest)
    node = make_node(nearby=[near])
    node.manifests.manifests[known.model.digest] = digests
    parts = list(range(len(known.model.spec.part_bytes)))
    told: list[Any] = []
    node.seen.on_copies_changed = lambda: told.extend(node.copies.transfers())
    claim = node.copies.claim(known.model, parts, InstanceId("i"), leased=True, trace_parent=TRACE)
    async with asyncio.timeout(10):
        assert [part.part async for part in node.copies.ready_parts(claim)] == parts
    last = told[-1]
    assert (last.model, last.priority, last.source) == (
        known.model.name,
        FetchPriority.COLD_START,
        known.model.uri,
    )
    given_bytes = {(share.kind, share.name): share.size_bytes for share in last.origins}
    total = sum(part.image_bytes for part in known.manifest.parts)
    assert sum(given_bytes.values()) <= total
    if whole:
        assert given_bytes.keys() == {(OriginKind.PEER, "near")}
    else:
        source = OriginKind.SOURCE, known.model.uri
        assert given_bytes.keys() == {(OriginKind.PEER, "near"), source}
        assert given_bytes[OriginKind.PEER, "near"] <= total // 2
    await until(lambda: node.seen.ended == [""])
    assert sum(count for _, count in node.seen.given) == total
    links = {link.name: link for link in node.copies.links()}
    assert links.keys() <= {"peer://near", "file://"}
    assert all(link.bytes_per_s > 0 for link in links.values())
    if whole:
        assert links["peer://near"].kind is OriginKind.PEER
    phase = node.seen.phases[-1][1]
    assert "bytes from near" in phase.detail
    await stop_telemetry()
    [span] = [one for one in sink.spans if one.name == "fetch" and one.trace_id in TRACE]
    assert span.attributes["origins"] == ", ".join(name for _, name in given_bytes)
    told_bytes = {kind: span.attributes[f"bytes_{kind}"] for kind in OriginKind}
    assert told_bytes[OriginKind.DISK] == 0
    assert sum(map(int, told_bytes.values())) == total
    assert (
        told_bytes[OriginKind.PEER]
        == sum(count for kind, count in node.seen.given if kind is OriginKind.PEER)
        > 0
    )


async def _digests_of(make_node: Any, known: Any) -> Manifest:
    """The manifest with every digest recorded, as after another node has read all of it."""
    first = make_node()
    first.add(known)
    claim = first.copies.claim(
        known.model, range(len(known.model.spec.part_bytes)), InstanceId("first"), leased=True
    )
    async with asyncio.timeout(10):
        async for _ in first.copies.ready_parts(claim):
            pass
    return first.manifests.manifests[known.model.digest]
