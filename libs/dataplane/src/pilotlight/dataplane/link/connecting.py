"""A connection to another node: reached at one of its addresses, and proved to be that node."""

import asyncio
import socket

from pilotlight.common.errors import PeerRefused, PeerUnavailable, PilotlightError
from pilotlight.common.handshake import Identity, Initiator
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.link import Accepted, Refused, Welcome
from pilotlight.common.waiting import within
from pilotlight.dataplane.link.stream import FrameStream

CONNECT_S = 5.0
"""For the connection and its handshake together."""


async def connected(
    peer: Peer, me: Identity, beat_s: float, *, one_sided: bool
) -> tuple[FrameStream, socket.socket]:
    """A connection whose other end has proved that it is the node.

    Args:
        peer: the node.
        me: what this node proves to it.
        beat_s: how often it is to give a sign of life.
        one_sided: whether this node can read the other one's memory.

    Raises:
        PilotlightError: it is another one, or takes this one for another.
        OSError: it cannot be made.
    """
    node_id = peer.node_id
    sock = await _reached(peer)
    try:
        stream = FrameStream(sock)
        side = Initiator(me, node_id, beat_s, one_sided=one_sided)
        await stream.write(side.hello())
        welcome = await stream.read_message(Welcome | Refused)
        if welcome is None:
            raise PeerRefused(f"{node_id} closed the connection within the handshake")
        try:
            await stream.write(side.on_welcome(welcome))
        except PeerRefused as error:
            await stream.write(Refused(code=error.code, message=error.message))
            raise
        answer = await stream.read_message(Accepted | Refused)
        if answer is None:
            raise PeerRefused(f"{node_id} closed the connection within the handshake")
        side.on_end(answer)
    except BaseException:
        sock.close()
        raise
    return stream, sock


async def _reached(peer: Peer) -> socket.socket:
    """A connection to the first address of the node's host that answers.

    Raises:
        PilotlightError, OSError: none does.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
    except (ValueError, OverflowError) as error:
        raise PeerUnavailable(
            f"{peer.node_id} says that it is at {peer.host}:{peer.port}, which is no address"
        ) from error
    failure: Exception = PeerUnavailable(f"{peer.host} has no address")
    for family, _, _, _, address in found:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await within(
                CONNECT_S / (1 + len(found)),
                loop.sock_connect(sock, address),
                f"reaching {address[0]}",
            )
        except (OSError, PilotlightError) as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
