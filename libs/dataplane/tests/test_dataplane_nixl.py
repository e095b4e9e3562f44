"""Chunks that are read out of another node's memory: by NIXL where it is installed, and by a
stand-in for it everywhere.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from linked_nodes import KEY, LinkedNode
from nixl_ways import WAYS, Way, command, stand_in
from structlog.testing import capture_logs

from pilotlight.checkpoint.checkpoint import read_chunk
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.handshake import Identity, Initiator
from pilotlight.common.messages.link import (
    Accepted,
    Ask,
    Enough,
    FromSender,
    Placed,
    Region,
    Sent,
    Waiting,
)
from pilotlight.common.testing import until
from pilotlight.dataplane.link.sender import MAX_OFFERED
from pilotlight.dataplane.link.stream import FrameStream
from pilotlight.dataplane.link.wire import HEADER, control_frame, decode_control, parse_head
from pilotlight.policy.ids import InstanceId, NodeId

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ONE = InstanceId("inst-1")
PARTS = range(4)


@pytest.fixture
def sent_by_tcp(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of chunks that all nodes of the test sent over their sockets."""
    sent: list[int] = []
    write_file = FrameStream.write_file

    async def count(
        self: FrameStream, head: bytes, descriptor: int, offset: int, size_bytes: int, moved: Any
    ) -> None:
        sent.append(size_bytes)
        await write_file(self, head, descriptor, offset, size_bytes, moved)

    monkeypatch.setattr(FrameStream, "write_file", count)
    return sent


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


@pytest.fixture
async def add(make_node: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Starts a node with links."""
    nodes: list[LinkedNode] = []

    async def start(name: str, way: Way | None = None, **options: Any) -> LinkedNode:
        linked = LinkedNode(name, reader=command(way) if way is not None else (), **options)
        node = make_node(nearby=[linked.peers])
        await linked.start(node, node.tools, node.copies)
        nodes.append(linked)
        return linked

    yield start
    for linked in reversed(nodes):
        await linked.stop()


@pytest.fixture
def registered(register: Callable[..., Any]) -> Any:
    """A model with layers of several chunks, and every digest recorded."""
    model = register(hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=2)
    source = FolderSource(model.folder)
    model.manifest = model.manifest.with_digests(
        {
            (p, c): chunk_digest(read_chunk(source, model.manifest, chunk))
            for p, part in enumerate(model.manifest.parts)
            for c, chunk in enumerate(part.chunks)
        }
    )
    return model


def total_bytes(registered: Any) -> int:
    return sum(part.image_bytes for part in registered.manifest.parts)


def order(linked: LinkedNode, registered: Any, *upstreams: LinkedNode) -> Any:
    linked.node.add(registered)
    linked.peers.follow(registered.model.digest, [upstream.peer for upstream in upstreams])
    return linked.node.copies.claim(registered.model, PARTS, ONE, leased=False)


async def whole(linked: LinkedNode, claim: Any, registered: Any) -> None:
    """It gets the whole model, and every byte is the source's."""
    await until(lambda: not claim.missing or claim.error is not None, deadline_s=60.0)
    assert claim.error is None
    assert_right(linked, registered)


def assert_right(linked: LinkedNode, registered: Any) -> None:
    source, pool = FolderSource(registered.folder), linked.node.pool
    for number, part in enumerate(registered.manifest.parts):
        image = pool.find(registered.model.digest, number)
        with pool.view(image, 0, image.image_bytes) as view:
            assert view == b"".join(
                read_chunk(source, registered.manifest, chunk) for chunk in part.chunks
            )


async def reads(linked: LinkedNode, *others: LinkedNode) -> None:
    """It can read the others' memory from now on."""
    for other in others:
        linked.peers.meet(other.peer)
    await until(
        lambda: all(linked.peers._links[other.me.node_id]._one_sided._learned for other in others),
        deadline_s=60.0,
    )


def said(logs: list[Any], action: str) -> list[Any]:
    return [entry for entry in logs if entry["action"] == action]


@pytest.mark.parametrize("way", WAYS)
async def test_a_chain_reads_every_byte_from_its_predecessors_memory(
    add, registered, way, sent_by_tcp
) -> None:
    source, a, b = await add("s", way), await add("a", way), await add("b", way)
    await whole(source, order(source, registered), registered)
    await reads(a, source)
    await reads(b, a, source)
    first, second = order(a, registered, source), order(b, registered, a, source)
    await whole(a, first, registered)
    await whole(b, second, registered)
    total = total_bytes(registered)
    assert sent_by_tcp == []
    assert (source.traffic.sent, a.traffic.sent) == ({"a": total}, {"b": total})
    assert b.traffic.received == {"a": total}
    # Nothing is pinned for ever.
    await until(lambda: not source.node.pool.is_pinned(registered.model.digest))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_it", ["sender", "receiver"])
async def test_a_node_with_it_and_one_without_talk_over_tcp(
    add, registered, way, sent_by_tcp, has_it, logs
) -> None:
    source = await add("s", way if has_it == "sender" else None)
    a = await add("a", way if has_it == "receiver" else None)
    node = source if has_it == "sender" else a
    await until(lambda: node.nixl.region is not None, deadline_s=60.0)
    await whole(source, order(source, registered), registered)
    await whole(a, order(a, registered, source), registered)
    assert sum(sent_by_tcp) == total_bytes(registered)
    assert not said(logs, "link_nixl_failed")


@pytest.mark.parametrize("what", ["breaks", "refuses", "hangs", "lies", "dies"])
@pytest.mark.parametrize("reads_before", [0, 11])
async def test_where_it_fails_the_link_goes_on_over_tcp(
    add, registered, sent_by_tcp, what, reads_before, logs
) -> None:
    source = await add("s", stand_in())
    a = await add("a", stand_in(f"{what}:{reads_before}"), stall_timeout_s=0.6)
    await whole(source, order(source, registered), registered)
    await reads(a, source)
    await whole(a, order(a, registered, source), registered)
    assert sent_by_tcp
    assert len(said(logs, "link_nixl_failed")) <= 1 + len(said(logs, "nixl_down"))
    # It is its own fault alone.
    assert not a.node.seen.failed
    assert {kind for kind, _ in a.node.seen.given} == {"peer"}


async def test_so_much_is_offered_at_once_and_no_more(add, registered) -> None:
    """To a node that reads nothing of it; and what is offered is where it says."""
    source = await add("s", stand_in())
    await whole(source, order(source, registered), registered)
    await until(lambda: source.nixl.region is not None, deadline_s=30.0)
    chunks = [
        (p, c, chunk)
        for p, part in enumerate(registered.manifest.parts)
        for c, chunk in enumerate(part.chunks)
    ]
    assert len(chunks) > MAX_OFFERED
    reader, writer = await asyncio.open_connection(source.peer.host, source.peer.port)

    async def hear() -> tuple[int, Any]:
        head = parse_head(await asyncio.wait_for(reader.readexactly(HEADER.size), 20))
        return head.request, decode_control(await reader.readexactly(head.length), FromSender)

    initiator = Initiator(Identity(NodeId("a"), KEY), NodeId("s"), 0.1, one_sided=True)
    writer.write(control_frame(initiator.hello()))
    writer.write(control_frame(initiator.on_welcome((await hear())[1])))
    assert [type((await hear())[1]) for _ in range(2)] == [Accepted, Region]
    pool, model = source.node.pool, registered.model.digest
    for number, (part, index, chunk) in enumerate(chunks):
        ask = Ask(
            model=model, part=part, chunk=index, digest=chunk.digest, from_byte=0, one_sided=True
        )
        writer.write(control_frame(ask, number))
    position, sent, acknowledged = dict.fromkeys(range(len(chunks)), 0), set[int](), set[int]()
    while len(sent) < len(chunks):
        number, message = await hear()
        match message:
            case Placed():
                part, _, chunk = chunks[number]
                image = pool.find(model, part)
                at = pool.geometry.data_offset + message.offset
                with pool.view(
                    image, chunk.image_offset + position[number], message.size_bytes
                ) as view:
                    assert view == os.pread(pool.descriptor, message.size_bytes, at)
                position[number] += message.size_bytes
            case Sent():
                assert position[number] == chunks[number][2].size_bytes
                sent.add(number)
                assert len(sent - acknowledged) <= MAX_OFFERED
            case Waiting() if len(sent - acknowledged) == MAX_OFFERED:
                # Nothing more comes before one of them is acknowledged.
                acknowledged.add(min(sent - acknowledged))
                writer.write(control_frame(Enough(), max(acknowledged)))
            case _:
                pass
    writer.close()


@pytest.mark.parametrize("what", ["missing", "unlearnable"])
async def test_where_there_is_no_way_by_it_everything_goes_over_tcp(
    add, registered, sent_by_tcp, what, logs
) -> None:
    source, a = await add("s", stand_in()), await add("a", stand_in(what))
    await whole(source, order(source, registered), registered)
    a.peers.meet(source.peer)
    await until(lambda: said(logs, "nixl_down") or said(logs, "link_nixl_failed"), deadline_s=30.0)
    await whole(a, order(a, registered, source), registered)
    assert sum(sent_by_tcp) == total_bytes(registered)
    assert len(said(logs, "nixl_down") + said(logs, "link_nixl_failed")) == 1


async def test_what_is_written_late_is_written_to_no_chunk(
    add, registered, sent_by_tcp, tmp_path: Path, logs
) -> None:
    """Reads that were given up end while their chunks are long complete, and change nothing."""
    now = tmp_path / "now"
    source = await add("s", stand_in())
    a = await add("a", stand_in(f"waits:2:{now}"), stall_timeout_s=0.6)
    await whole(source, order(source, registered), registered)
    await reads(a, source)
    await whole(a, order(a, registered, source), registered)
    assert sent_by_tcp
    run = a.nixl._run
    assert run is None or len(run.reads._free) < 16
    now.touch()
    await until(lambda: a.nixl._run is not None and a.nixl._run.reads.free == 16, deadline_s=30.0)
    assert_right(a, registered)
    assert not a.node.seen.failed


async def test_a_process_whose_reads_come_to_no_end_is_replaced(add, registered, logs) -> None:
    source = await add("s", stand_in())
    a = await add("a", stand_in("hangs:0"), stall_timeout_s=0.6)
    await whole(source, order(source, registered), registered)
    await reads(a, source)
    claim = order(a, registered, source)
    await until(lambda: a.nixl.generation == 2, deadline_s=30.0)
    await whole(a, claim, registered)
    assert "came to no end" in said(logs, "nixl_down")[0]["error"]


async def test_a_sender_whose_process_was_replaced_is_read_again(
    add, registered, sent_by_tcp, logs
) -> None:
    source, a = await add("s", stand_in("dies:0")), await add("a", stand_in())
    await whole(source, order(source, registered), registered)
    await reads(a, source)
    # Its process dies of its first read.
    await reads(source, a)
    region = source.nixl.region
    source.nixl._thread.call(source.nixl._run.ended.set)
    await until(lambda: source.nixl.region not in (None, region), deadline_s=30.0)
    link = a.peers._links[source.me.node_id]
    await until(
        lambda: link._one_sided._learned and link._one_sided._learned[0] == source.nixl.region,
        deadline_s=30.0,
    )
    await whole(a, order(a, registered, source), registered)
    assert sent_by_tcp == []
