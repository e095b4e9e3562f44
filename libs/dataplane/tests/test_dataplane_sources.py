"""Fetches from a bucket and from a hub: what comes, what a break costs, and what happens when the
source changes under the fetch.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from standin_s3 import ACCESS_KEY, SECRET_KEY, StandinS3, running_s3
from standin_sources import Fault, StandinHub, running_hub, sha256

from pilotlight.checkpoint.checkpoint import read_checkpoint, read_chunk
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.reader import MemorySource
from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.errors import SourceChanged, SourceUnavailable, UriNotAllowed
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.waiting import Backoff
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.readers import LOOKS, Abandoned, Readers, ReadProgress
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.model import Model

pytestmark = pytest.mark.anyio

ONE = InstanceId("inst-1")
TWO = InstanceId("inst-2")
BIG = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 512}
"""Parts of some 27 MB: four chunks each."""
SMALL = {"hidden_size": 256, "vocab_size": 512}
"""More than the first read of a header."""
PATIENCE = Patience(stall_timeout_s=5.0, tries=4, backoff=Backoff(first_s=0.001, limit_s=0.002))


class Place:
    """One source of a model's files, with the faults of its stand-in."""

    def __init__(self, server: StandinS3 | StandinHub, sources: Sources, uri: str) -> None:
        self.server = server
        self.sources = sources
        self.uri = uri
        self.bytes_server = server.cdn if isinstance(server, StandinHub) else server

    def open(self, model: Model, manifest: Manifest) -> SourceOrigin:
        return SourceOrigin(self.sources.open(model.uri), manifest, model.uri)

    def change(self, files: dict[str, bytes]) -> None:
        """Other bytes under the same names."""
        if isinstance(self.server, StandinHub):
            self.server.commits[self.server.refs["main"]].update(files)
            self.server.push(files, "other")
            self.server.cdn.expire()
        else:
            self.server.put("models", "big", files)


@pytest.fixture(params=["s3", "hub"])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, bytes]], Place]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with running_s3("models") as s3, running_hub({}) as hub:

        def make(files: dict[str, bytes]) -> Place:
            roots: dict[str, Any] = {"model_roots": "s3://models, hf://org"}
            if request.param == "s3":
                s3.put("models", "big", files)
                settings = ModelRootsSettings(s3_endpoint=s3.url, s3_allow_http=True, **roots)
                return Place(s3, Sources(settings, PATIENCE), "s3://models/big")
            hub.push(files)
            settings = ModelRootsSettings(
                hub_endpoint=hub.url, hub_private_hosts=f"127.0.0.1:{hub.cdn.port}", **roots
            )
            return Place(hub, Sources(settings, PATIENCE), "hf://org/name")

        yield make


def registered(register: Callable[..., Any], node: Any, place: Place) -> Any:
    """What the gateway would register."""
    pinned = place.sources.pin(place.uri)
    checkpoint = read_checkpoint(pinned.source)
    pinned.source.close()
    model = replace(
        register("template").model,
        uri=pinned.uri,
        digest=checkpoint.manifest.digest(),
        spec=checkpoint.spec,
    )
    node.manifests.manifests[model.digest] = checkpoint.manifest
    return model, checkpoint.manifest


async def drain(node: Any, claim: Any) -> list[int]:
    async with asyncio.timeout(20):
        return [part.part async for part in node.copies.ready_parts(claim)]


def image_of(node: Any, model: Model, part: int) -> bytes:
    image = node.pool.find(model.digest, part)
    with node.pool.view(image, 0, image.image_bytes) as view:
        return bytes(view)


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_model_comes_whole_whatever_breaks(make_node, register, place, shards: int) -> None:
    files = tiny_files(tiny_config(**BIG), shards=shards)
    source = place(files)
    node = make_node(open_source=source.open)
    model, manifest = registered(register, node, source)
    source.bytes_server.faults += [
        Fault("", "cut", times=2),
        Fault("", "status", 503, times=2),
        Fault("", "cut", times=2),
    ]
    claim = node.copies.claim(model, range(len(manifest.parts)), ONE, leased=True)
    assert await drain(node, claim) == list(range(len(manifest.parts)))
    known = MemorySource(files)
    other = read_checkpoint(known).manifest
    for number, part in enumerate(other.parts):
        assert image_of(node, model, number) == b"".join(
            read_chunk(known, other, chunk) for chunk in part.chunks
        )


async def test_a_source_that_changes_under_the_fetch_is_refused(make_node, register, place) -> None:
    source = place(tiny_files(tiny_config(**BIG)))
    changed = {
        name: data[:-1] + bytes([data[-1] ^ 1])
        for name, data in tiny_files(tiny_config(**BIG)).items()
    }
    started = threading.Event()

    class ChangesInTheMiddle(SourceOrigin):
        reads = 0

        def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
            type(self).reads += 1
            if self.reads == 6:
                source.change(changed)
                started.set()
            super().read(part, chunk, work)

    node = make_node(
        open_source=lambda model, manifest: ChangesInTheMiddle(
            source.sources.open(model.uri), manifest, model.uri
        )
    )
    model, manifest = registered(register, node, source)
    last = len(manifest.parts) - 1
    claim = node.copies.claim(model, range(last + 1), ONE, leased=True)
    with pytest.raises(SourceChanged):
        await drain(node, claim)
    assert started.is_set()
    assert last not in claim.ready
    assert node.pool.find(model.digest, last) is None


def known_digests(node: Any, model: Model) -> list[Digest]:
    parts = node.manifests.manifests[model.digest].parts
    return [chunk.digest for part in parts for chunk in part.chunks if chunk.digest is not None]


async def settled(node: Any) -> None:
    async with asyncio.timeout(10):
        while node.copies._fetches:
            node.seen.changed.clear()
            await node.seen.changed.wait()


def alter(hub: StandinHub, files: dict[str, bytes], offset: int) -> None:
    """What comes from the CDN has another byte, in one file, and nothing else tells."""
    name = max(name for name in files if name.endswith(".safetensors"))
    data = bytearray(files[name])
    data[offset] ^= 1
    hub.cdn.blobs[sha256(files[name])] = bytes(data)


@pytest.mark.parametrize("place", ["hub"], indirect=True)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("offset", [-1, 8], ids=["parameters", "header"])
async def test_bytes_that_are_not_the_registered_files_are_given_up(
    make_node, register, place, shards: int, offset: int
) -> None:
    files = tiny_files(tiny_config(**SMALL), shards=shards)
    source = place(files)
    node = make_node(open_source=source.open)
    model, manifest = registered(register, node, source)
    every = range(len(manifest.parts))
    alter(source.server, files, offset)
    order = node.copies.claim(model, every, ONE, leased=False)
    for _ in range(2):
        lease = node.copies.claim(model, every, ONE, leased=True)
        with pytest.raises(
            SourceChanged,
            match=r"safetensors: the bytes that came do not have the digest that was registered",
        ):
            await drain(node, lease)
        assert every[-1] not in lease.ready, "no copy is whole before it is checked"
        # Its parts are read until the lease ends; a claim that comes meanwhile gets none of them.
        late = node.copies.claim(model, [0], TWO, leased=True)
        with pytest.raises(SourceChanged, match="do not have the digest"):
            await drain(node, late)
        assert node.pool.find(model.digest, 0) is not None
        node.copies.release(late)
        node.copies.release(lease)
        await settled(node)
        assert node.pool.free_bytes == node.pool.geometry.data_bytes
        assert not known_digests(node, model)
    node.copies.release(order)
    source.server.cdn.blobs.update({sha256(data): data for data in files.values()})
    assert await drain(node, node.copies.claim(model, every, ONE, leased=True)) == list(every)
    await settled(node)
    assert len(known_digests(node, model)) == sum(len(part.chunks) for part in manifest.parts)


@pytest.mark.parametrize("place", ["hub"], indirect=True)
async def test_a_copy_that_was_fetched_in_pieces_is_checked_when_it_is_whole(
    make_node, register, place
) -> None:
    files = tiny_files(tiny_config(**SMALL))
    source = place(files)
    node = make_node(open_source=source.open)
    model, manifest = registered(register, node, source)
    every = range(len(manifest.parts))
    first = node.copies.claim(model, [0, 2], ONE, leased=False)
    assert await drain(node, first) == [0, 2]
    await settled(node)
    assert not known_digests(node, model)
    assert await drain(node, node.copies.claim(model, every, TWO, leased=True)) == list(every)
    await settled(node)
    assert len(known_digests(node, model)) == sum(len(part.chunks) for part in manifest.parts)
    # What has recorded digests is checked by them alone.
    node.copies.release(first)
    heads = [
        asked
        for asked in source.server.cdn.asked
        if asked.headers.get("range", "").startswith("bytes=0-")
    ]
    other = make_node(open_source=source.open)
    other.manifests.manifests.update(node.manifests.manifests)
    assert await drain(other, other.copies.claim(model, every, ONE, leased=True)) == list(every)
    assert heads == [
        asked
        for asked in source.server.cdn.asked
        if asked.headers.get("range", "").startswith("bytes=0-")
    ]


@pytest.mark.parametrize("place", ["hub"], indirect=True)
async def test_a_header_that_was_altered_at_registration_is_noticed(
    make_node, register, place
) -> None:
    files = tiny_files(tiny_config(**SMALL))
    source = place(files)
    node = make_node(open_source=source.open)
    header = files["model.safetensors"]
    one, other = b"layers.0.self_attn.k_proj", b"layers.0.self_attn.v_proj"
    swapped = (
        header.replace(one, b"#" * len(one)).replace(other, one).replace(b"#" * len(one), other)
    )
    assert swapped != header
    source.server.cdn.blobs[sha256(header)] = swapped
    model, manifest = registered(register, node, source)
    source.server.cdn.blobs[sha256(header)] = header
    with pytest.raises(SourceChanged, match="headers are not those that were registered"):
        await drain(node, node.copies.claim(model, range(len(manifest.parts)), ONE, leased=True))


async def test_a_source_that_gives_nothing_is_a_stall(make_node, register, place) -> None:
    source = place(tiny_files(tiny_config(**BIG)))
    node = make_node(open_source=source.open, stall_timeout_s=0.4)
    model, _ = registered(register, node, source)
    source.bytes_server.faults.append(Fault("", "stall", times=99))
    claim = node.copies.claim(model, [0, 1], ONE, leased=True)
    with pytest.raises(SourceUnavailable, match=r"stalled: no bytes for 0\.4 s"):
        await drain(node, claim)
    source.bytes_server.released.set()


async def test_a_source_outside_of_the_loaders_roots_is_not_read(
    make_node, register, place
) -> None:
    source = place(tiny_files(tiny_config()))
    node = make_node(open_source=source.open)
    model, _ = registered(register, node, source)
    asked = len(source.server.asked)
    source.sources = Sources(ModelRootsSettings(model_roots="s3://other, hf://other"), PATIENCE)
    with pytest.raises(UriNotAllowed):
        await drain(node, node.copies.claim(model, [0], ONE, leased=True))
    assert len(source.server.asked) == asked


async def test_files_outside_of_a_source_are_not_read(make_node, register, place) -> None:
    source = place(tiny_files(tiny_config()))
    node = make_node()
    _, manifest = registered(register, node, source)
    for name in ("../secret", "a/b", "..", "/etc/passwd", "a\0b", ""):
        odd = structs.replace(manifest, files=(structs.replace(manifest.files[0], name=name),))
        with pytest.raises(UriNotAllowed):
            SourceOrigin(MemorySource({}), odd, "memory://")


async def test_slow_is_not_stalled() -> None:
    """A read that takes many times the stall timeout is let go on as long as bytes come, and so is
    a read that waits for its thread.
    """
    readers = Readers(1, stall_timeout_s=0.08)
    go_on, came = [threading.Event() for _ in range(8)], [threading.Event() for _ in range(8)]
    looks = 0

    def slow(progress: ReadProgress) -> str:
        for event, told in zip(go_on, came, strict=True):
            assert event.wait(10)
            progress(1)
            told.set()
        return "done"

    progress = ReadProgress()
    first = await readers.submit(slow, progress)
    second = asyncio.ensure_future(readers.submit(lambda _: "after", ReadProgress()))

    def look() -> int:
        """A byte comes between every second look and the next one, however long that takes."""
        nonlocal looks
        assert not second.done()
        looks += 1
        number, odd = divmod(looks, LOOKS // 2)
        if not odd and number <= len(go_on):
            go_on[number - 1].set()
            assert came[number - 1].wait(10)
        return progress.bytes

    async with asyncio.timeout(20):
        assert await readers.ended(first, look)
        assert await first == "done"
        assert await (await second) == "after"
    assert looks >= LOOKS // 2 * len(go_on), "it took four stall timeouts"
    readers.stop()


async def test_who_waits_for_a_thread_that_hangs_is_told() -> None:
    readers = Readers(1, stall_timeout_s=0.2)
    released = threading.Event()
    first = await readers.submit(lambda _: released.wait(10), ReadProgress())
    with pytest.raises(SourceUnavailable, match="no thread that reads got a byte"):
        await readers.submit(lambda _: None, ReadProgress())
    released.set()
    await first
    async with asyncio.timeout(10):
        assert (
            await (await readers.submit(lambda _: "works again", ReadProgress())) == "works again"
        )
    readers.stop()


def test_a_read_that_nobody_waits_for_ends() -> None:
    progress = ReadProgress()
    progress(3)
    progress.abandoned = True
    with pytest.raises(Abandoned):
        progress(4)
    assert progress.bytes == 7
