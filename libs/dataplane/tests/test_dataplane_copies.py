"""Copies of models in the host pool: how they come whole, share fetches, and are kept."""

import asyncio
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from pilotlight.checkpoint.checkpoint import read_chunk
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.errors import BadRequest, HostPoolFull, SourceUnavailable
from pilotlight.common.testing import until
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.file_reads import FileReads
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.native.reads import FileRead
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, PhaseName

ONE = InstanceId("inst-1")
TWO = InstanceId("inst-2")

pytestmark = pytest.mark.anyio

BIG = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 512}
"""Parts of some 27 MB: four chunks each."""


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

    claim = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    assert await node.drain(claim) == list(registered.parts)
    for part in registered.parts:
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


class Gate:
    """Opens folders whose chunks come when a test lets them."""

    def __init__(self) -> None:
        self.open = threading.Event()
        """Lets the chunks come of every source that is opened while it is this event."""
        self.opening = threading.Event()
        self.closing = threading.Event()
        self.opened = 0
        self.closed = 0
        self.reads: list[int] = []

    def __call__(self, model: Model, manifest: Manifest) -> "Gated":
        source = Gated(self, model, manifest)
        self.opened += 1
        self.opening.set()
        return source


class Gated(SourceOrigin):
    """One folder, as a gate opened it."""

    def __init__(self, gate: Gate, model: Model, manifest: Manifest) -> None:
        super().__init__(FolderSource(Path(model.uri.removeprefix("file://"))), manifest, model.uri)
        self._gate = gate
        self._may_come = gate.open

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        assert self._may_come.wait(10)
        self._gate.reads.append(chunk.size_bytes)
        super().read(part, chunk, work)

    def close(self) -> None:
        super().close()
        self._gate.closed += 1
        self._gate.closing.set()


async def test_all_who_want_a_model_share_one_fetch(make_node, register) -> None:
    gate = Gate()
    node = make_node(open_source=gate)
    registered = node.add(register())
    order = node.copies.claim(registered.model, registered.parts, ONE, leased=False)
    leases = [
        node.copies.claim(registered.model, parts, ONE, leased=True)
        for parts in ([0, 1], [2, 3], [3])
    ]
    other = node.copies.claim(registered.model, [2], TWO, leased=True)
    gate.open.set()
    assert [await node.drain(lease) for lease in leases] == [[0, 1], [2, 3], [3]]
    assert await node.drain(other) == [2]
    assert await node.drain(order) == [0, 1, 2, 3]
    await node.settled()
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
    claim = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    await asyncio.to_thread(gate.opening.wait, 10)
    node.copies.release(claim)
    assert node.copies.transfers() == ()
    gate.open.set()
    await node.settled()
    assert node.pool.free_bytes == node.pool.geometry.data_bytes
    await until(lambda: gate.opened == gate.closed)
    assert node.seen.ended == [""]


async def test_who_comes_while_an_old_fetch_ends_gets_a_new_one(make_node, register) -> None:
    gate = Gate()
    node = make_node(open_source=gate)
    registered = node.add(register())
    first = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    await asyncio.to_thread(gate.opening.wait, 10)
    node.copies.release(first)
    second = node.copies.claim(registered.model, registered.parts, TWO, leased=True)
    gate.open.set()
    assert await node.drain(second) == list(registered.parts)
    assert gate.opened == 2


async def test_an_old_fetch_that_ends_closes_no_file_that_the_new_one_reads(
    make_node, register, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reading, run = Gate(), threading.Event(), FileReads.run

    def run_once_the_old_is_closed(self: FileReads, read: FileRead, *, resident_only: bool) -> None:
        # The descriptors are with the read by now.
        reading.set()
        assert gate.closing.wait(10)
        run(self, read, resident_only=resident_only)

    monkeypatch.setattr(FileReads, "run", run_once_the_old_is_closed)
    node = make_node(open_source=gate)
    registered = node.add(register())
    first = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    await asyncio.to_thread(gate.opening.wait, 10)
    old, gate.open = gate.open, threading.Event()
    node.copies.release(first)
    second = node.copies.claim(registered.model, registered.parts, TWO, leased=True)
    gate.open.set()
    assert await asyncio.to_thread(reading.wait, 10)
    assert (gate.opened, gate.closed) == (2, 0)
    old.set()
    assert await node.drain(second) == list(registered.parts)
    for part in registered.parts:
        assert image_of(node, registered.model, part) == oracle(registered, part)
    await until(lambda: gate.closed == 2)


async def test_a_lease_keeps_a_copy_and_an_order_does_not(make_node, register) -> None:
    node = make_node()
    registered = node.add(register())
    digest = registered.model.digest
    order = node.copies.claim(registered.model, registered.parts, ONE, leased=False)
    lease = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    assert node.copies.drop([digest]) == (), "it is on its way"
    await node.drain(lease)
    await node.drain(order)
    await node.settled()
    assert node.copies.drop([digest, Digest("ab" * 32)]) == ()
    [copy] = node.copies.copies("node-1")
    assert (copy.leases, copy.parts) == (1, tuple(registered.parts))
    node.copies.release(lease)
    assert node.copies.drop([digest]) == (digest,)
    assert node.copies.copies("node-1") == ()
    assert node.pool.free_bytes == node.pool.geometry.data_bytes


async def test_a_copy_that_is_there_is_ready_at_once(make_node, register) -> None:
    node = make_node()
    registered = node.add(register())
    await node.drain(node.copies.claim(registered.model, registered.parts, ONE, leased=True))
    again = node.copies.claim(registered.model, registered.parts, TWO, leased=True)
    assert again.missing == ()
    assert await node.drain(again) == list(registered.parts)
    assert [instance_id for instance_id, _ in node.seen.phases] == [ONE]


async def test_a_pool_without_room_fails_the_claim(make_node, register) -> None:
    node = make_node(pool_bytes=1024 * 1024)
    registered = node.add(register(**BIG))
    claim = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    with pytest.raises(HostPoolFull):
        await node.drain(claim)
    await node.settled()
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
    claim = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    with pytest.raises(SourceUnavailable, match=r"no bytes for 0\.05 s"):
        await node.drain(claim)
    await node.settled()
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
    claim = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    await node.drain(claim)
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
        registered.model, registered.parts, ONE, leased=False, since_s=sent.at_s
    )
    async with asyncio.timeout(10):
        fetched = [part.ready.at_s async for part in node.copies.ready_parts(order)]
    [(_, phase)] = node.seen.phases
    assert phase.start_s == sent.at_s
    assert now.at_s <= fetched[0]
    assert fetched == sorted(fetched)
    assert fetched[-1] <= phase.end_s, "what leads from there to the engine is not the fetch's"
    leased_s = SystemClock().monotonic_s()
    lease = node.copies.claim(registered.model, registered.parts, TWO, leased=True)
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
    await node.drain(claim)
