"""The link's frames, its handshake, and how each side ends a connection that is not as it should
be.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from linked_nodes import HOST, KEY, LinkedNode, Traffic
from structlog.testing import capture_logs

from pilotlight.common.clock import SystemClock
from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.errors import PeerUnavailable
from pilotlight.common.handshake import LINK_PURPOSE, Identity, Initiator, Responder
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.link import (
    LINK_VERSION,
    Accepted,
    Ask,
    Enough,
    FromReceiver,
    FromSender,
    Hello,
    Proof,
    Refused,
    Welcome,
)
from pilotlight.common.testing import until
from pilotlight.dataplane.link.peer import LinkState, PeerLink
from pilotlight.dataplane.link.server import LinkServer
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.link.wire import (
    HEADER,
    MAX_CONTROL_BYTES,
    FrameKind,
    bytes_head,
    control_frame,
    decode_control,
    parse_head,
)
from pilotlight.policy.ids import Digest, NodeId

R, S = NodeId("receiver"), NodeId("sender")
OTHER_KEY = ClusterKey(b"the key of another cluster", LINK_PURPOSE)


class Raw:
    """A connection by which a test says what it wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, message: Any, request: int = 0) -> None:
        self.writer.write(control_frame(message, request))
        await self.writer.drain()

    async def hear(self) -> Any:
        head = parse_head(await self.reader.readexactly(HEADER.size))
        body = await self.reader.readexactly(head.length)
        return decode_control(body, FromReceiver | FromSender)

    async def greet(self, key: ClusterKey = KEY) -> None:
        initiator = Initiator(Identity(R, key), S)
        await self.say(initiator.hello())
        await self.say(initiator.on_welcome(await self.hear()))
        assert isinstance(await self.hear(), Accepted)

    async def is_closed(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(65536), 10) == b""
        except ConnectionError:
            return True


@pytest.fixture
async def sender(make_node: Callable[..., Any]) -> AsyncIterator[LinkedNode]:
    linked = LinkedNode(S)
    node = make_node(nearby=[linked.peers])
    await linked.start(node, node.tools, node.copies)
    yield linked
    await linked.stop()


async def raw_to(linked: LinkedNode) -> Raw:
    return Raw(*await asyncio.open_connection(HOST, linked.peer.port))


GARBAGE = {
    "no frame at all": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "message_undecodable"),
    "a control frame that is too long": (
        HEADER.pack(FrameKind.CONTROL, 0, MAX_CONTROL_BYTES + 1),
        "message_too_large",
    ),
    "bytes that are too many": (
        HEADER.pack(FrameKind.BYTES, 1, 1024 * 1024 + 1),
        "message_too_large",
    ),
    "bytes at all": (bytes_head(1, 4) + b"abcd", "message_undecodable"),
    "a body that is no message": (
        HEADER.pack(FrameKind.CONTROL, 0, 4) + b"\xc1\xc1\xc1\xc1",
        "message_undecodable",
    ),
    "another message": (control_frame(Enough()), "message_undecodable"),
    "an old version": (control_frame(Hello(version=0, node_id=R, nonce=bytes(32))), "peer_refused"),
    "a part of a header": (b"C\0\0", None),
    "nothing": (b"", None),
}


@pytest.mark.anyio
@pytest.mark.parametrize("what", GARBAGE)
async def test_a_client_that_is_no_node_is_shown_out_once(sender: LinkedNode, what: str) -> None:
    data, code = GARBAGE[what]
    raw = await raw_to(sender)
    with capture_logs() as logs:
        raw.writer.write(data)
        await raw.writer.drain()
        if code is None:
            raw.writer.close()
        else:
            refused = await raw.hear()
            assert isinstance(refused, Refused)
            assert refused.code == code
            assert await raw.is_closed()
        await until(
            lambda: (
                sender.traffic.refused == 1
                and sender.server is not None
                and not sender.server.connections
            )
        )
    raw.writer.close()
    assert [entry["action"] for entry in logs] == ["link_refused"]


@pytest.mark.anyio
async def test_who_says_nothing_is_shown_out_after_a_while(make_node: Callable[..., Any]) -> None:
    linked, node = LinkedNode(S), make_node()
    linked.node, linked.copies = node, node.copies
    thread, traffic = LinkThread("out"), Traffic()
    server = LinkServer(
        Identity(S, KEY), (HOST, 0), None, thread, SystemClock(), traffic, handshake_s=0.05
    )
    await server.start()
    raw = Raw(*await asyncio.open_connection(HOST, server.port))
    refused = await raw.hear()
    assert (refused.code, traffic.refused) == ("deadline_exceeded", 1)
    assert await raw.is_closed()
    raw.writer.close()
    await server.stop()
    await server.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("proof", ["wrong", "another"])
async def test_the_sender_takes_no_requests_without_the_key(sender: LinkedNode, proof: str) -> None:
    raw = await raw_to(sender)
    await raw.say(Hello(version=LINK_VERSION, node_id=R, nonce=bytes(32)))
    welcome = await raw.hear()
    assert isinstance(welcome, Welcome)
    told = (
        Proof(proof=bytes(32))
        if proof == "wrong"
        else Ask(model=Digest("0" * 64), part=0, chunk=0, digest=None, from_byte=0)
    )
    await raw.say(told)
    assert isinstance(await raw.hear(), Refused)
    assert await raw.is_closed()
    raw.writer.close()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "data", [bytes_head(1, 4) + b"abcd", control_frame(Hello(version=1, node_id=R, nonce=b""))]
)
async def test_a_client_that_does_not_keep_to_the_protocol_is_shown_out(
    sender: LinkedNode, data: bytes
) -> None:
    raw = await raw_to(sender)
    await raw.greet()
    raw.writer.write(data)
    assert isinstance(await raw.hear(), Refused)
    assert await raw.is_closed()
    raw.writer.close()


@pytest.mark.anyio
async def test_two_requests_of_one_number_end_the_connection(sender: LinkedNode) -> None:
    raw = await raw_to(sender)
    await raw.greet()
    ask = Ask(model=Digest("0" * 64), part=0, chunk=0, digest=Digest("1" * 64), from_byte=0)
    await raw.say(ask, 7)
    await raw.say(ask, 7)
    assert isinstance(await raw.hear(), Refused)
    raw.writer.close()


class Door:
    """A node's address where a test answers."""

    def __init__(self, answer: Callable[[Raw], Any]) -> None:
        self._answer = answer
        self.connections = 0

    async def start(self) -> Peer:
        self.server = await asyncio.start_server(self._accept, HOST, 0)
        return Peer(node_id=S, host=HOST, port=self.server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._answer(Raw(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def stop(self) -> None:
        self.server.close()


async def other_key(raw: Raw) -> None:
    responder = Responder(Identity(S, OTHER_KEY))
    await raw.say(responder.on_hello(await raw.hear()))
    await raw.reader.read(1)


async def refuses(raw: Raw) -> None:
    await raw.hear()
    await raw.say(Refused(code="peer_refused", message="not you"))


async def other_node(raw: Raw) -> None:
    responder = Responder(Identity(NodeId("another"), KEY))
    await raw.say(responder.on_hello(await raw.hear()))
    await raw.reader.read(1)


async def garbage(raw: Raw) -> None:
    raw.writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await raw.reader.read(1)


async def oversized(raw: Raw) -> None:
    raw.writer.write(HEADER.pack(FrameKind.CONTROL, 0, 2**31))
    await raw.reader.read(1)


async def leaves(raw: Raw) -> None:
    await raw.hear()


ANSWERS = {
    other_key: "another cluster key",
    refuses: "not you",
    other_node: "another answers where sender should",
    garbage: "speaks something else",
    oversized: "at most",
    leaves: "closed the connection within the handshake",
}


@pytest.mark.anyio
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
async def test_the_receiver_asks_nothing_of_another_node(answer: Callable[[Raw], Any]) -> None:
    door, thread, traffic = Door(answer), LinkThread("in"), Traffic()
    peer = await door.start()
    thread.start()
    link = PeerLink(Identity(R, KEY), peer, thread, SystemClock(), traffic, stall_timeout_s=1.0)
    with capture_logs() as logs:
        thread.spawn("link", link.keep())
        # It tries again, and says no word more about it.
        await until(lambda: door.connections >= 3)
    downs = [entry for entry in logs if entry["action"] == "link_down"]
    assert len(downs) == 1
    assert ANSWERS[answer] in downs[0]["error"]
    assert link.state in (LinkState.DOWN, LinkState.AGAIN)
    with pytest.raises(PeerUnavailable):
        await asyncio.to_thread(link.pull, ask_of(), NoWork())
    await door.stop()
    await asyncio.to_thread(thread.stop)


@pytest.mark.anyio
async def test_links_end_in_order_and_threads_with_them(sender: LinkedNode) -> None:
    receiver = LinkedNode(R)
    await receiver.peers.start()
    receiver.peers.meet(sender.peer)
    receiver.peers.meet(sender.peer)
    receiver.peers.meet(replace_id(sender.peer, R))
    await until(lambda: receiver.peers.states == {S: LinkState.UP})
    assert sender.server is not None
    assert sender.server.connections == 1
    receiver.peers.part(S)
    await until(lambda: sender.server is not None and sender.server.connections == 0)
    assert receiver.peers.states == {}
    await receiver.stop()
    await receiver.stop()


@pytest.mark.anyio
async def test_a_node_that_comes_back_elsewhere_is_met_there(make_node: Callable[..., Any]) -> None:
    receiver, first, second = LinkedNode(R), LinkedNode(S), LinkedNode(S)
    await receiver.peers.start()
    for linked in (first, second):
        node = make_node()
        await linked.start(node, node.tools, node.copies)
    receiver.peers.meet(first.peer)
    await until(lambda: receiver.peers.states == {S: LinkState.UP})
    await first.stop()
    receiver.peers.meet(second.peer)
    await until(lambda: second.server is not None and second.server.connections == 1)
    await until(lambda: receiver.peers.states == {S: LinkState.UP})
    await receiver.stop()
    await second.stop()


def replace_id(peer: Peer, node_id: NodeId) -> Peer:
    return Peer(node_id=node_id, host=peer.host, port=peer.port)


def ask_of() -> Ask:
    return Ask(model=Digest("0" * 64), part=0, chunk=0, digest=Digest("1" * 64), from_byte=0)


class NoWork:
    """Work that must get nothing."""

    position = 0

    def check(self) -> None: ...
    def sign(self) -> None: ...
