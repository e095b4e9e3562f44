import asyncio
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from pilotlight.checkpoint.checkpoint import read_chunk
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.errors import (
    BadRequest,
    CorruptChunk,
    HostPoolFull,
    PilotlightError,
    SourceChanged,
    SourceUnavailable,
)
from pilotlight.common.testing import until
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, PhaseName

ONE = InstanceId("inst-1")
TWO = InstanceId("inst-2")

pytestmark = pytest.mark.anyio

BIG = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 512}
"""Parts of some 27 MB: four chunks each."""


def parts_of(registered) -> range:
    return range(len(registered.manifest.parts))


async def drain(node, claim) -> list[int]:
    async with asyncio.timeout(10):
        return [part.part async for part in node.copies.ready_parts(claim)]


def image_of(node, model: Model, part: int) -> bytes:
    image = node.pool.find(model.digest, part)
    with node.pool.view(image, 0, image.image_bytes) as view:
        return bytes(view)


def oracle(registered, part: int) -> bytes:
    source = FolderSource(registered.folder)
    return b"".join(
        read_chunk(source, registered.manifest, chunk)
        for chunk in registered.manifest.parts[part].chunks
    )


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("changes", [{}, BIG, {"tie_word_embeddings": True}])
async def test_a_model_comes_whole_and_in_order(
    make_node, register, shards: int, changes: dict
) -> None:
    node = make_node()
    registered = node.add(register(shards=shards, **changes))
    # What was in the pool before must not shine through where an image has gaps.
    dirty = node.pool.reserve(Digest("ff" * 32), 0, node.pool.free_bytes - 65536, 1)
    with node.pool.view(dirty, 0, 1 << 20) as view:
        view[:] = b"\xaa" * (1 << 20)
    node.pool.discard(dirty)

    claim = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    assert await drain(node, claim) == list(parts_of(registered))
    for part in parts_of(registered):
        assert image_of(node, registered.model, part) == oracle(registered, part)
    assert [(instance_id, phase.name) for instance_id, phase in node.seen.phases] == [
        (ONE, PhaseName.FETCH)
    ]
    node.copies.release(claim)


async def test_places_are_those_of_the_tensors(make_node, register) -> None:
    node = make_node()
    registered = node.add(register())
    claim = node.copies.claim(registered.model, [1], ONE, leased=True)
    [ready] = [part async for part in node.copies.ready_parts(claim)]
    described = registered.manifest.parts[1].tensors
    assert [(place.name, place.shape, place.size_bytes) for place in ready.tensors] == [
        (tensor.name, tensor.shape, tensor.size_bytes) for tensor in described
    ]
    base = node.pool.file_offset(node.pool.find(registered.model.digest, 1))
    assert [place.offset - base for place in ready.tensors] == [
        tensor.image_offset for tensor in described
    ]


async def test_first_fetch_learns_digests_and_the_second_is_checked_against_them(
    make_node, register
) -> None:
    node = make_node()
    registered = node.add(register())
    digest = registered.model.digest
    first = node.copies.claim(registered.model, parts_of(registered), ONE, leased=False)
    await drain(node, first)
    node.copies.release(first)
    await settled(node)
    known = node.manifests.manifests[digest]
    assert all(chunk.digest is not None for part in known.parts for chunk in part.chunks)
    assert node.copies.drop([digest]) == (digest,)

    # One bit of the last tensor turns, and the file's time is put back.
    weights = registered.folder / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = node.copies.claim(registered.model, parts_of(registered), TWO, leased=True)
    with pytest.raises(CorruptChunk, match="recorded is"):
        await drain(node, again)
    node.copies.release(again)
    await settled(node)
    last = len(registered.manifest.parts) - 1
    assert node.pool.find(digest, last) is None
    assert node.pool.find(digest, 0) is not None, "parts that were verified stay"


async def settled(node) -> None:
    async with asyncio.timeout(10):
        while node.copies.transfers() or node.copies._fetches:
            node.seen.changed.clear()
            await node.seen.changed.wait()


def touch(registered) -> None:
    weights = registered.folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))


def shorten(registered) -> None:
    os.truncate(registered.folder / "model.safetensors", 100)


def remove(registered) -> None:
    (registered.folder / "model.safetensors").unlink()


def make_a_pipe(registered) -> None:
    remove(registered)
    os.mkfifo(registered.folder / "model.safetensors")


def replace(registered) -> None:
    weights = registered.folder / "model.safetensors"
    other = weights.with_name("other")
    other.write_bytes(weights.read_bytes())
    os.utime(other, ns=(1, 1))
    other.rename(weights)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (touch, SourceChanged),
        (shorten, SourceChanged),
        (remove, SourceChanged),
        (replace, SourceChanged),
        (make_a_pipe, SourceChanged),
    ],
)
async def test_a_source_that_is_not_what_was_pinned(
    make_node, register, damage: Callable[..., None], error: type[PilotlightError]
) -> None:
    node = make_node()
    registered = node.add(register())
    damage(registered)
    claim = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    with pytest.raises(error, match=r"model\.safetensors"):
        await drain(node, claim)
    await settled(node)
    assert node.pool.free_bytes == node.pool.geometry.data_bytes


class Gate:
    """Opens folders whose chunks come when a test lets them."""

    kind = OriginKind.SOURCE
    trusted = True
    link = "gate"
    name = "gate"

    def __init__(self) -> None:
        self.open = threading.Event()
        self.opening = threading.Event()
        self.opened = 0
        self.closed = 0
        self.reads: list[int] = []

    def __call__(self, model: Model, manifest: Manifest) -> "Gate":
        self.opened += 1
        self.opening.set()
        self.chunks = SourceOrigin(
            FolderSource(Path(model.uri.removeprefix("file://"))), manifest, model.uri
        )
        return self

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        assert self.open.wait(10)
        self.reads.append(chunk.size_bytes)
        self.chunks.read(part, chunk, work)

    def close(self) -> None:
        self.closed += 1
        self.chunks.close()


async def test_all_who_want_a_model_share_one_fetch(make_node, register) -> None:
    gate = Gate()
    node = make_node(open_source=gate)
    registered = node.add(register())
    order = node.copies.claim(registered.model, parts_of(registered), ONE, leased=False)
    leases = [
        node.copies.claim(registered.model, parts, ONE, leased=True)
        for parts in ([0, 1], [2, 3], [3])
    ]
    other = node.copies.claim(registered.model, [2], TWO, leased=True)
    gate.open.set()
    assert [await drain(node, lease) for lease in leases] == [[0, 1], [2, 3], [3]]
    assert await drain(node, other) == [2]
    assert await drain(node, order) == [0, 1, 2, 3]
    await settled(node)
    await until(lambda: gate.closed == 1)
    assert (gate.opened, len(gate.reads)) == (1, 4)
    # One instance's intervals do not overlap, however many claims it had.
    mine = sorted(
        (phase.start_s, phase.end_s) for instance, phase in node.seen.phases if instance == ONE
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    assert [instance for instance, _ in node.seen.phases].count(TWO) == 1


async def test_a_fetch_that_nobody_wants_any_more_ends_and_frees_its_room(
    make_node, register
) -> None:
    gate = Gate()
    node = make_node(open_source=gate)
    registered = node.add(register())
    claim = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    await asyncio.to_thread(gate.opening.wait, 10)
    node.copies.release(claim)
    assert node.copies.transfers() == ()
    gate.open.set()
    await settled(node)
    assert node.pool.free_bytes == node.pool.geometry.data_bytes
    await until(lambda: gate.opened == gate.closed)
    assert node.seen.ended == [""]


async def test_who_comes_while_an_old_fetch_ends_gets_a_new_one(make_node, register) -> None:
    gate = Gate()
    node = make_node(open_source=gate)
    registered = node.add(register())
    first = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    await asyncio.to_thread(gate.opening.wait, 10)
    node.copies.release(first)
    second = node.copies.claim(registered.model, parts_of(registered), TWO, leased=True)
    gate.open.set()
    assert await drain(node, second) == list(parts_of(registered))
    assert gate.opened == 2


async def test_a_failed_fetch_fails_all_who_wait_and_can_be_tried_again(
    make_node, register
) -> None:
    node = make_node()
    registered = node.add(register())
    weights = registered.folder / "model.safetensors"
    hidden = weights.rename(weights.with_name("hidden"))
    claims = [
        node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
        for _ in range(3)
    ]
    for claim in claims:
        with pytest.raises(SourceChanged):
            await drain(node, claim)
        node.copies.release(claim)
    hidden.rename(weights)
    again = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    assert await drain(node, again) == list(parts_of(registered))


async def test_a_lease_keeps_a_copy_and_an_order_does_not(make_node, register) -> None:
    node = make_node()
    registered = node.add(register())
    digest = registered.model.digest
    order = node.copies.claim(registered.model, parts_of(registered), ONE, leased=False)
    lease = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    assert node.copies.drop([digest]) == (), "it is on its way"
    await drain(node, lease)
    await drain(node, order)
    await settled(node)
    assert node.copies.drop([digest, Digest("ab" * 32)]) == ()
    [copy] = node.copies.copies("node-1")
    assert (copy.leases, copy.parts) == (1, tuple(parts_of(registered)))
    node.copies.release(lease)
    assert node.copies.drop([digest]) == (digest,)
    assert node.copies.copies("node-1") == ()
    assert node.pool.free_bytes == node.pool.geometry.data_bytes


async def test_a_copy_that_is_there_is_ready_at_once(make_node, register) -> None:
    node = make_node()
    registered = node.add(register())
    await drain(node, node.copies.claim(registered.model, parts_of(registered), ONE, leased=True))
    again = node.copies.claim(registered.model, parts_of(registered), TWO, leased=True)
    assert again.missing == ()
    assert await drain(node, again) == list(parts_of(registered))
    assert [instance_id for instance_id, _ in node.seen.phases] == [ONE]


async def test_a_pool_without_room_fails_the_claim(make_node, register) -> None:
    node = make_node(pool_bytes=1024 * 1024)
    registered = node.add(register(**BIG))
    claim = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    with pytest.raises(HostPoolFull):
        await drain(node, claim)
    await settled(node)
    assert node.seen.ended == ["host_pool_full"]


@pytest.mark.parametrize("parts", [[], [-1], [4], [0, 99]])
async def test_parts_that_do_not_exist_are_refused(make_node, register, parts: list[int]) -> None:
    node = make_node()
    registered = node.add(register())
    with pytest.raises(BadRequest, match="parts 0 to 3"):
        node.copies.claim(registered.model, parts, ONE, leased=True)


async def test_a_source_that_hangs_is_a_stall(make_node, register) -> None:
    gate = Gate()
    node = make_node(open_source=gate, stall_timeout_s=0.05)
    registered = node.add(register())
    claim = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    with pytest.raises(SourceUnavailable, match=r"no bytes for 0\.05 s"):
        await drain(node, claim)
    await settled(node)
    assert node.pool.free_bytes == node.pool.geometry.data_bytes, (
        "a thread that hangs writes nothing any more when it wakes"
    )
    with node.pool.view(
        node.pool.reserve(Digest("ee" * 32), 0, 1 << 20, 1), 0, 1 << 20
    ) as somebody_elses:
        before = bytes(somebody_elses)
        gate.open.set()
        await until(lambda: gate.closed == 1)
        assert bytes(somebody_elses) == before


async def test_the_link_and_the_injected_delay_are_part_of_the_fetch(make_node, register) -> None:
    node = make_node(bytes_per_s=1_000_000, faults="fetch=0.1")
    registered = node.add(register())
    total_bytes = registered.model.spec.total_bytes
    claim = node.copies.claim(registered.model, parts_of(registered), ONE, leased=True)
    await drain(node, claim)
    [(_, phase)] = node.seen.phases
    assert phase.end_s - phase.start_s >= 0.1 + total_bytes / 1_000_000
    assert node.copies.transfers() == ()


async def test_a_fetch_begins_with_its_order_and_parts_say_since_when_they_are_ready(
    make_node, register
) -> None:
    node = make_node()
    registered = node.add(register())
    now = moment_of(SystemClock())
    sent = Moment(at_s=now.at_s - 0.2, wall_offset_s=now.wall_offset_s)
    order = node.copies.claim(
        registered.model, parts_of(registered), ONE, leased=False, since_s=sent.at_s
    )
    async with asyncio.timeout(10):
        fetched = [part.ready.at_s async for part in node.copies.ready_parts(order)]
    [(_, phase)] = node.seen.phases
    assert phase.start_s == sent.at_s
    assert now.at_s <= fetched[0]
    assert fetched == sorted(fetched)
    assert fetched[-1] <= phase.end_s, "what leads from there to the engine is not the fetch's"
    leased_s = SystemClock().monotonic_s()
    lease = node.copies.claim(registered.model, parts_of(registered), TWO, leased=True)
    held_s = SystemClock().monotonic_s()
    async with asyncio.timeout(10):
        there = {part.ready.at_s async for part in node.copies.ready_parts(lease)}
    assert all(leased_s <= ready_s <= held_s for ready_s in there)


async def test_transfers_say_how_far_they_are(make_node, register) -> None:
    gate = Gate()
    node = make_node(open_source=gate)
    registered = node.add(register())
    claim = node.copies.claim(registered.model, [0, 1], ONE, leased=True)
    [transfer] = node.copies.transfers()
    assert (transfer.done_bytes, transfer.total_bytes) == (
        0,
        sum(registered.model.spec.part_bytes[:2]),
    )
    gate.open.set()
    await drain(node, claim)
