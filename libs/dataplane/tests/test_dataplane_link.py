"""The link's frames, its handshake, and how each side ends a connection that is not as it should be."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from linked_nodes import HOST, KEY, LinkedNode, Traffic
from structlog.testing import capture_logs

from pilotlight.common.clock import SystemClock
from pilotlight.common.cluster_key import ClusterKey, find_cluster_key
from pilotlight.common.errors import MessageTooLarge, MessageUndecodable, PeerRefused, PeerUnavailable, SettingsInvalid
from pilotlight.common.handshake import LINK_PURPOSE, AskingSide, GivingSide, Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.link import (
    LINK_VERSION,
    Accepted,
    Ask,
    Enough,
    FromAsker,
    FromGiver,
    Hello,
    NotHeld,
    Placed,
    Proof,
    Recorded,
    Refused,
    Region,
    Sent,
    Units,
    Waiting,
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
from pilotlight.dataplane.link.yielding import HOLD_S, Yielding
from pilotlight.policy.types import Digest, FetchPriority, NodeId

A, G = NodeId("asker"), NodeId("giver")
OTHER_KEY = ClusterKey(b"the key of another cluster", LINK_PURPOSE)


# ---------------------------------------------------------------- frames


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_a_header_is_read_or_refused(data: bytes) -> None:
    try:
        head = parse_head(data)
    except (MessageUndecodable, MessageTooLarge):
        return
    assert (head.kind, head.request, head.length) == struct.unpack(">B3xII", data)
    assert head.length <= 1024 * 1024


@given(st.binary(max_size=512), st.sampled_from([FromAsker, FromGiver]))
def test_a_body_is_a_message_or_refused(data: bytes, of: Any) -> None:
    with suppress(MessageUndecodable):
        assert isinstance(decode_control(data, of), of)


digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True).map(Digest)
messages = st.one_of(
    st.builds(Hello, version=st.integers(0, 9), node_id=st.text().map(NodeId), nonce=st.binary(), beat_s=st.floats(0, 9)),
    st.builds(Proof, proof=st.binary(max_size=64)),
    st.builds(
        Ask,
        model=digests,
        part=st.integers(0, 999),
        chunk=st.integers(0, 999),
        digest=digests | st.none(),
        from_byte=st.integers(0, 2**23),
        priority=st.sampled_from(FetchPriority),
    ),
    st.builds(Units, digests=st.binary(max_size=256)),
    st.builds(Region, agent=st.binary(max_size=512), address=st.integers(0, 2**64 - 1), size_bytes=st.integers(0, 2**50)),
    st.builds(Placed, offset=st.integers(0, 2**50), size_bytes=st.integers(0, 2**20)),
    st.just(Enough()) | st.just(Sent()) | st.just(NotHeld()) | st.just(Recorded()) | st.just(Waiting()),
)


@given(messages, st.integers(0, 2**32 - 1))
def test_what_was_framed_is_read_again(message: Any, request: int) -> None:
    data = control_frame(message, request)
    head = parse_head(data[: HEADER.size])
    assert (head.kind, head.request, head.length) == (FrameKind.CONTROL, request, len(data) - HEADER.size)
    assert decode_control(data[HEADER.size :], FromAsker | FromGiver) == message


# ---------------------------------------------------------------- the handshake, without sockets


def sides(key: ClusterKey = KEY, expected: NodeId = G) -> tuple[AskingSide, GivingSide]:
    return AskingSide(Identity(A, KEY), expected), GivingSide(Identity(G, key))


def test_two_nodes_of_one_cluster_know_each_other() -> None:
    asking, giving = sides()
    proof = asking.on_welcome(giving.on_hello(asking.hello()))
    asking.on_end(giving.on_proof(proof))
    assert giving.peer == A


def test_the_proof_is_the_keyed_hash_that_the_page_says() -> None:
    """Recomputed from the words of docs/decisions/0014."""
    asking, giving = sides()
    welcome = giving.on_hello(asking.hello())
    key = blake3(b"the key of this cluster", derive_key_context="pilotlight cluster key 2026: link").digest()
    fields = [b"gives", LINK_VERSION.to_bytes(4, "big"), A.encode(), asking.nonce, G.encode(), giving.nonce]
    told = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    assert welcome.proof == blake3(told, key=key).digest()


def test_the_asker_refuses_another_key_and_another_node() -> None:
    asking, giving = sides(OTHER_KEY)
    with pytest.raises(PeerRefused, match="another cluster key"):
        asking.on_welcome(giving.on_hello(asking.hello()))
    asking, giving = sides(expected=NodeId("somebody else"))
    with pytest.raises(PeerRefused, match="giver answers where somebody else should"):
        asking.on_welcome(giving.on_hello(asking.hello()))


@pytest.mark.parametrize("proof", [b"", bytes(32), OTHER_KEY.proof(b"asks")])
def test_the_giver_refuses_who_does_not_know_the_key(proof: bytes) -> None:
    asking, giving = sides()
    giving.on_hello(asking.hello())
    with pytest.raises(PeerRefused, match="another cluster key"):
        giving.on_proof(Proof(proof=proof))


def test_a_proof_is_good_once_and_for_its_side_only() -> None:
    asking, giving = sides()
    welcome = giving.on_hello(asking.hello())
    proof = asking.on_welcome(welcome)
    with pytest.raises(PeerRefused):
        # Sent back to who made it.
        giving.on_proof(Proof(proof=welcome.proof))
    again = GivingSide(giving.me)
    again.on_hello(asking.hello())
    with pytest.raises(PeerRefused):
        # Recorded, and played again.
        again.on_proof(proof)
    with pytest.raises(PeerRefused):
        GivingSide(giving.me).on_proof(proof)


def test_another_version_and_a_short_nonce_are_refused_on_both_sides() -> None:
    asking, giving = sides()
    hello = asking.hello()
    for wrong in (
        Hello(version=LINK_VERSION + 1, node_id=A, nonce=hello.nonce),
        Hello(version=LINK_VERSION, node_id=A, nonce=b"x"),
    ):
        with pytest.raises(PeerRefused):
            giving.on_hello(wrong)
    welcome = giving.on_hello(hello)
    for wrong in (
        Welcome(version=0, node_id=G, nonce=welcome.nonce, proof=welcome.proof),
        Welcome(version=LINK_VERSION, node_id=G, nonce=b"", proof=welcome.proof),
    ):
        with pytest.raises(PeerRefused):
            asking.on_welcome(wrong)


def test_the_key_is_found_in_its_file_and_a_short_one_is_refused(tmp_path: Any) -> None:
    assert find_cluster_key(None, LINK_PURPOSE) is None
    assert find_cluster_key(tmp_path, LINK_PURPOSE) is None
    (tmp_path / "cluster-key").write_text("the key of this cluster\n")
    found = find_cluster_key(tmp_path, LINK_PURPOSE)
    assert found is not None
    assert found.proof(b"x") == KEY.proof(b"x")
    assert found.proof(b"x") != ClusterKey(b"the key of this cluster", "artifacts").proof(b"x")
    assert "cluster" not in repr(found)
    (tmp_path / "cluster-key").write_text("short")
    with pytest.raises(SettingsInvalid, match="16"):
        find_cluster_key(tmp_path, LINK_PURPOSE)


def test_what_is_in_the_background_waits_for_a_cold_start_but_not_long() -> None:
    yielding = Yielding()
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.0) == 0
    yielding.sent(FetchPriority.PREFETCH, 10.0)
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.0) == 0
    yielding.sent(FetchPriority.COLD_START, 10.0)
    assert yielding.delay_s(FetchPriority.COLD_START, 10.0) == 0
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.01) == pytest.approx(HOLD_S - 0.01)
    assert yielding.delay_s(FetchPriority.PREFETCH, 10.0 + HOLD_S) == 0


# ---------------------------------------------------------------- over sockets


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
        return decode_control(body, FromAsker | FromGiver)

    async def greet(self, key: ClusterKey = KEY) -> None:
        asking = AskingSide(Identity(A, key), G)
        await self.say(asking.hello())
        await self.say(asking.on_welcome(await self.hear()))
        assert isinstance(await self.hear(), Accepted)

    async def is_closed(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(65536), 10) == b""
        except ConnectionError:
            return True


@pytest.fixture
async def giver(make_node: Callable[..., Any]) -> AsyncIterator[LinkedNode]:
    linked = LinkedNode(G)
    node = make_node(nearby=[linked.peers])
    await linked.start(node, node.tools, node.copies)
    yield linked
    await linked.stop()


async def raw_to(linked: LinkedNode) -> Raw:
    return Raw(*await asyncio.open_connection(HOST, linked.peer.port))


GARBAGE = {
    "no frame at all": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "message_undecodable"),
    "a control frame that is too long": (HEADER.pack(FrameKind.CONTROL, 0, MAX_CONTROL_BYTES + 1), "message_too_large"),
    "bytes that are too many": (HEADER.pack(FrameKind.BYTES, 1, 1024 * 1024 + 1), "message_too_large"),
    "bytes at all": (bytes_head(1, 4) + b"abcd", "message_undecodable"),
    "a body that is no message": (HEADER.pack(FrameKind.CONTROL, 0, 4) + b"\xc1\xc1\xc1\xc1", "message_undecodable"),
    "another message": (control_frame(Enough()), "message_undecodable"),
    "an old version": (control_frame(Hello(version=0, node_id=A, nonce=bytes(32))), "peer_refused"),
    "a part of a header": (b"C\0\0", None),
    "nothing": (b"", None),
}


@pytest.mark.anyio
@pytest.mark.parametrize("what", GARBAGE)
async def test_whoever_is_no_node_is_shown_out_once(giver: LinkedNode, what: str) -> None:
    data, code = GARBAGE[what]
    raw = await raw_to(giver)
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
        await until(lambda: giver.traffic.refused == 1 and giver.server is not None and not giver.server.connections)
    raw.writer.close()
    assert [entry["action"] for entry in logs] == ["link_refused"]


@pytest.mark.anyio
async def test_who_says_nothing_is_shown_out_after_a_while(make_node: Callable[..., Any]) -> None:
    linked, node = LinkedNode(G), make_node()
    linked.node, linked.copies = node, node.copies
    thread, traffic = LinkThread("out"), Traffic()
    server = LinkServer(Identity(G, KEY), (HOST, 0), None, thread, SystemClock(), traffic, handshake_s=0.05)  # type: ignore[arg-type]
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
async def test_the_giver_takes_no_requests_without_the_key(giver: LinkedNode, proof: str) -> None:
    raw = await raw_to(giver)
    await raw.say(Hello(version=LINK_VERSION, node_id=A, nonce=bytes(32)))
    welcome = await raw.hear()
    assert isinstance(welcome, Welcome)
    told = Proof(proof=bytes(32)) if proof == "wrong" else Ask(model=Digest("0" * 64), part=0, chunk=0, digest=None, from_byte=0)
    await raw.say(told)
    assert isinstance(await raw.hear(), Refused)
    assert await raw.is_closed()
    raw.writer.close()


@pytest.mark.anyio
@pytest.mark.parametrize("data", [bytes_head(1, 4) + b"abcd", control_frame(Hello(version=1, node_id=A, nonce=b""))])
async def test_who_does_not_keep_to_the_protocol_is_shown_out(giver: LinkedNode, data: bytes) -> None:
    raw = await raw_to(giver)
    await raw.greet()
    raw.writer.write(data)
    assert isinstance(await raw.hear(), Refused)
    assert await raw.is_closed()
    raw.writer.close()


@pytest.mark.anyio
async def test_two_requests_of_one_number_end_the_connection(giver: LinkedNode) -> None:
    raw = await raw_to(giver)
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
        return Peer(node_id=G, host=HOST, port=self.server.sockets[0].getsockname()[1])

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
    giving = GivingSide(Identity(G, OTHER_KEY))
    await raw.say(giving.on_hello(await raw.hear()))
    await raw.reader.read(1)


async def refuses(raw: Raw) -> None:
    await raw.hear()
    await raw.say(Refused(code="peer_refused", message="not you"))


async def other_node(raw: Raw) -> None:
    giving = GivingSide(Identity(NodeId("another"), KEY))
    await raw.say(giving.on_hello(await raw.hear()))
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
    other_node: "another answers where giver should",
    garbage: "speaks something else",
    oversized: "at most",
    leaves: "closed the connection within the handshake",
}


@pytest.mark.anyio
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.__name__)
async def test_the_asker_asks_nothing_of_who_is_not_the_node(answer: Callable[[Raw], Any]) -> None:
    door, thread, traffic = Door(answer), LinkThread("in"), Traffic()
    peer = await door.start()
    thread.start()
    link = PeerLink(Identity(A, KEY), peer, thread, SystemClock(), traffic, stall_timeout_s=1.0)
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
async def test_links_end_in_order_and_threads_with_them(giver: LinkedNode) -> None:
    asker = LinkedNode(A)
    await asker.peers.start()
    asker.peers.meet(giver.peer)
    asker.peers.meet(giver.peer)
    asker.peers.meet(replace_id(giver.peer, A))
    await until(lambda: asker.peers.states == {G: LinkState.UP})
    assert giver.server is not None
    assert giver.server.connections == 1
    asker.peers.part(G)
    await until(lambda: giver.server is not None and giver.server.connections == 0)
    assert asker.peers.states == {}
    await asker.stop()
    await asker.stop()


@pytest.mark.anyio
async def test_a_node_that_comes_back_elsewhere_is_met_there(make_node: Callable[..., Any]) -> None:
    asker, first, second = LinkedNode(A), LinkedNode(G), LinkedNode(G)
    await asker.peers.start()
    for linked in (first, second):
        node = make_node()
        await linked.start(node, node.tools, node.copies)
    asker.peers.meet(first.peer)
    await until(lambda: asker.peers.states == {G: LinkState.UP})
    await first.stop()
    asker.peers.meet(second.peer)
    await until(lambda: second.server is not None and second.server.connections == 1)
    await until(lambda: asker.peers.states == {G: LinkState.UP})
    await asker.stop()
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
