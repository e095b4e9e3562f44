"""Links to nodes that break rules, addresses that are none, and bytes that wait behind others."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from linked_nodes import HOST, KEY, LinkedNode, Traffic
from structlog.testing import capture_logs

from pilotlight.checkpoint.digests import chunk_digest, unit_digests
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import PeerUnavailable
from pilotlight.common.handshake import Identity, Responder
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.link import Ask, FromReceiver, Sent, Units, Waiting
from pilotlight.common.testing import until
from pilotlight.common.waiting import cancel_all
from pilotlight.dataplane.chunk_fill import ChunkFill, ChunkWork, WrongBytes
from pilotlight.dataplane.link.peer import LinkState, PeerLink
from pilotlight.dataplane.link.stream import FrameStream
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.link.wire import (
    HEADER,
    bytes_head,
    control_frame,
    decode_control,
    parse_head,
)
from pilotlight.dataplane.link.yielding import HOLD_S
from pilotlight.dataplane.readers import ReadProgress
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import Digest, InstanceId, NodeId

pytestmark = pytest.mark.anyio

ME, HOSTILE = NodeId("receiver"), NodeId("hostile")
ONE = InstanceId("inst-1")
CONTENT = bytes(range(256)) * 1024


@asynccontextmanager
async def linked_to(answer: Callable[[asyncio.StreamWriter, int], Any]) -> AsyncIterator[PeerLink]:
    """A link to a node of this cluster that answers the first request as it likes."""

    async def hear(reader: asyncio.StreamReader) -> tuple[Any, int]:
        head = parse_head(await reader.readexactly(HEADER.size))
        return decode_control(await reader.readexactly(head.length), FromReceiver), head.request

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responder = Responder(Identity(HOSTILE, KEY))
        writer.write(control_frame(responder.on_hello((await hear(reader))[0])))
        writer.write(control_frame(responder.on_proof((await hear(reader))[0])))
        answer(writer, (await hear(reader))[1])
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    server, thread = await asyncio.start_server(serve, HOST, 0), LinkThread("in")
    thread.start()
    peer = Peer(node_id=HOSTILE, host=HOST, port=server.sockets[0].getsockname()[1])
    link = PeerLink(Identity(ME, KEY), peer, thread, SystemClock(), Traffic(), stall_timeout_s=2.0)
    thread.spawn("link", link.keep())
    try:
        yield link
    finally:
        await asyncio.to_thread(thread.stop)
        server.close()


def work_of(digest: Digest | None) -> tuple[ChunkFill, ChunkWork]:
    fill = ChunkFill(digest, len(CONTENT), lambda offset, data: None)
    return fill, fill.begin(HOSTILE, ReadProgress())


def ask_of(digest: Digest | None) -> Ask:
    return Ask(model=Digest("0" * 64), part=0, chunk=0, digest=digest, from_byte=0)


def gives_bytes(writer: asyncio.StreamWriter, request: int) -> None:
    writer.write(bytes_head(request, len(CONTENT)) + CONTENT + control_frame(Sent(), request))


def gives_a_list(writer: asyncio.StreamWriter, request: int) -> None:
    writer.write(control_frame(Units(digests=b"".join(unit_digests(CONTENT))), request))


@pytest.mark.parametrize("answer", [gives_bytes, gives_a_list])
async def test_nothing_is_taken_of_a_chunk_that_nobody_can_check(
    answer: Callable[[asyncio.StreamWriter, int], Any],
) -> None:
    """Asked when a digest is recorded, a node gives the bytes themselves, or a list for them: it
    might be any.
    """
    fill, work = work_of(None)
    async with linked_to(answer) as link:
        with pytest.raises(WrongBytes):
            await asyncio.to_thread(link.pull, ask_of(None), work)
    assert fill.received_bytes == 0
    assert fill.prefix.units is None


async def test_bytes_without_their_list_are_checked_at_the_end() -> None:
    digest = chunk_digest(CONTENT)
    fill, work = work_of(digest)
    async with linked_to(gives_bytes) as link:
        await asyncio.to_thread(link.pull, ask_of(digest), work)
    assert fill.is_whole
    fill, work = work_of(chunk_digest(CONTENT[::-1]))
    async with linked_to(gives_bytes) as link:
        with pytest.raises(WrongBytes):
            await asyncio.to_thread(link.pull, ask_of(work.digest), work)
    assert fill.received_bytes == 0


@pytest.mark.parametrize(
    ("host", "port"), [("a" * 70, 80), ("a..b", 80), (HOST, 70_000), ("\0", 80), ("", 0)]
)
async def test_an_address_that_is_none_is_a_node_that_cannot_be_reached(
    host: str, port: int
) -> None:
    thread = LinkThread("in")
    thread.start()
    link = PeerLink(
        Identity(ME, KEY),
        Peer(node_id=HOSTILE, host=host, port=port),
        thread,
        SystemClock(),
        Traffic(),
        stall_timeout_s=2.0,
    )
    with capture_logs() as logs:
        thread.spawn("link", link.keep())
        await until(lambda: link.state is LinkState.DOWN)
    assert [entry["node"] for entry in logs if entry["action"] == "link_down"] == [HOSTILE]
    with pytest.raises(PeerUnavailable):
        await asyncio.to_thread(link.pull, ask_of(Digest("1" * 64)), work_of(Digest("1" * 64))[1])
    assert not thread.died.done()
    await asyncio.to_thread(thread.stop)


async def test_every_address_of_a_host_is_tried(make_node: Callable[..., Any]) -> None:
    """``localhost`` is two addresses, mostly; a node listens at one of them."""
    receiver, sender = LinkedNode(ME), LinkedNode("sender")
    node = make_node()
    await sender.start(node, node.tools, node.copies)
    await receiver.peers.start()
    receiver.peers.meet(Peer(node_id=sender.me.node_id, host="localhost", port=sender.peer.port))
    await until(lambda: receiver.peers.states == {sender.me.node_id: LinkState.UP})
    await receiver.stop()
    await sender.stop()


async def test_nothing_is_sent_behind_a_frame_that_was_broken_off(tmp_path: Path) -> None:
    """It would be taken for the rest of the frame, and its sender for a liar."""
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    listener = socket.create_server((HOST, 0))
    with (
        listener,
        socket.create_connection(listener.getsockname()) as receiver,
        (tmp_path / "file").open("rb") as file,
    ):
        stream = FrameStream(listener.accept()[0])
        sending = asyncio.create_task(
            stream.write_file(bytes_head(1, 1), file.fileno(), 0, 64 << 20, lambda count: None)
        )
        receiver.settimeout(10)
        assert await asyncio.to_thread(receiver.recv, HEADER.size)
        await cancel_all([sending])
        with pytest.raises(OSError, match="broken off"):
            await stream.write(Waiting())
        stream.close()


class Waiters:
    """One node that has a model, one that fetches it ahead, and a cold start of another node that
    takes all of the link.
    """

    def __init__(self, source: LinkedNode, ahead: LinkedNode, registered: Any) -> None:
        self.source = source
        self.ahead = ahead
        self.registered = registered

    async def fetch(self) -> Any:
        self.ahead.node.add(self.registered)
        self.ahead.peers.follow(self.registered.model.digest, [self.source.peer])
        parts = range(len(self.registered.manifest.parts))
        claim = self.ahead.node.copies.claim(
            self.registered.model, parts, ONE, leased=False, priority=FetchPriority.PREFETCH
        )
        await until(lambda: self.source.node.pool.is_pinned(self.registered.model.digest))
        return claim

    def take_link(self, for_s: float = 3600.0) -> None:
        """The cold start keeps the link, however slow the machine is."""
        assert self.source.server is not None
        self.source.server._yielding.sent(
            FetchPriority.COLD_START, SystemClock().monotonic_s() + for_s
        )

    def leave_link(self) -> None:
        self.take_link(-HOLD_S)


@pytest.fixture
async def waiters(
    make_node: Callable[..., Any], register: Callable[..., Any]
) -> AsyncIterator[Waiters]:
    registered = register()
    nodes: list[LinkedNode] = []
    for name, stall_timeout_s in (("source", 10.0), ("ahead", 1.5)):
        linked = LinkedNode(name, stall_timeout_s=stall_timeout_s)
        node = make_node(nearby=[linked.peers], stall_timeout_s=stall_timeout_s)
        node.add(registered)
        await linked.start(node, node.tools, node.copies)
        nodes.append(linked)
    source = nodes[0].node
    claim = source.copies.claim(
        registered.model, range(len(registered.manifest.parts)), ONE, leased=False
    )
    await until(lambda: not claim.missing)
    # The other node knows the digests, as from the object store.
    registered.manifest = source.manifests.manifests[registered.model.digest]
    yield Waiters(*nodes, registered)
    for linked in nodes:
        await linked.stop()


async def test_who_waits_behind_a_cold_start_hears_that_all_is_well(waiters: Waiters) -> None:
    waiters.take_link()
    claim = await waiters.fetch()
    clock = SystemClock()
    until_s = clock.monotonic_s() + 2.5
    await until(lambda: clock.monotonic_s() > until_s)
    assert claim.missing
    assert not waiters.ahead.node.seen.failed
    waiters.leave_link()
    await until(lambda: not claim.missing)
    assert not waiters.ahead.node.seen.failed


async def test_what_a_cold_start_has_come_to_wait_for_is_asked_for_again(waiters: Waiters) -> None:
    waiters.take_link()
    claim = await waiters.fetch()
    assert claim.missing
    claim.priority = FetchPriority.COLD_START
    await until(lambda: not claim.missing)
    assert not waiters.ahead.node.seen.failed
    assert set(waiters.source.traffic.sent) == {"ahead"}
