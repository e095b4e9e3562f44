"""A channel between hosts, over TCP: made with a node that proves that it knows the cluster's key,
and with no other.

::

    connect                                  a door (door.py)
    frame: Hello(about) ->                                          until the other end is trusted, a frame has at most
                                     <- frame: Welcome, its proof     HANDSHAKE.header_bytes and no payload
    frame: Proof        ->
                                     <- frame: Accepted, or Refused and why
    frames of stages    <-> frames of stages

In their first and last words both ends say where descriptors of device memory come to, if they have
any (``device_path``). An end that knows nothing of that says nothing, and hears nothing of it.

What follows is neither encrypted nor signed, as with links between loaders: a host that can change
the packets can change activations.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pilotlight.common.errors import MessageUndecodable
from pilotlight.common.errors import PeerRefused as NotOfThisCluster
from pilotlight.common.handshake import Identity, Initiator
from pilotlight.common.messages.codec import decode_msgpack, encode_msgpack
from pilotlight.common.messages.link import Accepted, Refused, Welcome
from pilotlight.engine.channel.channel import WINDOW_FRAMES, Frame
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.stream import FrameLimits, StreamChannel
from pilotlight.engine.errors import PeerLost, PeerRefused, PeerSilent
from pilotlight.policy.ids import NodeId

HANDSHAKE = FrameLimits(header_bytes=4096, payload_bytes=0, ring_bytes=0)
TRUSTED = FrameLimits()
DEAD_S = 20
"""A host that acknowledges nothing for this long is gone, whether something was sent to it or not.
"""
KEEPALIVES = 3
"""Asked for within that time, where nothing was sent."""
LOW_LATENCY_TOS = 0x48
"""DSCP AF21, "low-latency data" (RFC 4594): for networks whose switches know it."""
INTERACTIVE = 6
"""TC_PRIO_INTERACTIVE: a host's own queue sends it first, where it has bands (pfifo_fast, prio,
fq)."""
MAX_DISCARDED_BYTES = 16 << 20
"""Of what came too late, so that the last frame sent is not taken back by a reset."""
_NOTHING = memoryview(b"")


class TcpChannel(StreamChannel):
    """One end. Until ``trust``, it takes what belongs to a handshake and nothing longer."""

    def __init__(
        self,
        connection: socket.socket,
        monotonic_s: Callable[[], float],
        window: int = WINDOW_FRAMES,
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_S // (KEEPALIVES + 1))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_S // (KEEPALIVES + 1))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, LOW_LATENCY_TOS)
        else:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOW_LATENCY_TOS)
        # After the one above, which sets it too.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, INTERACTIVE)
        super().__init__(connection, monotonic_s, window, HANDSHAKE)

    def trust(self) -> None:
        """The other end is of this cluster: from now on it may send frames of any size that stages
        send.
        """
        self._limits = TRUSTED

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            with suppress(OSError):
                self._write()
                self._socket.shutdown(socket.SHUT_WR)
                self._discard()
        super().close()

    def _discard(self) -> None:
        """Throws away what came.

        Closing a connection with bytes unread resets it, and what was sent last may be lost.
        """
        left = MAX_DISCARDED_BYTES
        while left > 0 and (got := self._socket.recv(min(left, 1 << 16))):
            left -= len(got)


def connect(
    address: tuple[str, int],
    me: Identity,
    expected: NodeId,
    about: str,
    monotonic_s: Callable[[], float],
    timeout_s: float,
    window: int = WINDOW_FRAMES,
    devices: Devices | None = None,
) -> TcpChannel:
    """A channel to the stage that waits for ``about`` at a node's door.

    Args:
        address: host and port of the door. A name is looked up, for as long as the system's
            resolver takes.
        me: what this node proves.
        expected: the node whose door it should be.
        about: which channel: the same words as at the door.
        monotonic_s: the clock of the deadline.
        timeout_s: for the connection and its handshake together.
        window: as of every channel; both ends have the same.
        devices: this process's device, where payloads may go from device to device.

    Raises:
        PeerLost: nothing listens at the address.
        PeerSilent: the connection or an answer took too long.
        PeerRefused: it is not the node, or does not take this one for one of its cluster.
    """
    deadline_s = monotonic_s() + timeout_s
    try:
        connection = socket.create_connection(address, max(timeout_s, 0.001))
    except TimeoutError as error:
        raise PeerSilent(
            f"{expected} did not answer at {address[0]}:{address[1]} within {timeout_s} s"
        ) from error
    except OSError as error:
        raise PeerLost(
            f"{expected} cannot be reached at {address[0]}:{address[1]}: {error}"
        ) from error
    channel = TcpChannel(connection, monotonic_s, window)
    path = devices.path() if devices is not None else None
    channel.carry(path)
    try:
        accepted = _shake_hands(
            channel,
            Initiator(me, expected, about=about, device_at=path.address if path else ""),
            lambda: max(0.0, deadline_s - monotonic_s()),
        )
        if path is not None and not path.meet(accepted.device_at):
            channel.carry(None)
    except BaseException:
        channel.close()
        raise
    return channel


def _shake_hands(channel: TcpChannel, side: Initiator, left_s: Callable[[], float]) -> Accepted:
    try:
        say(channel, side.hello(), left_s())
        welcome = heard(channel, Welcome | Refused, left_s())
        try:
            proof = side.on_welcome(welcome)
        except NotOfThisCluster as error:
            say(channel, Refused(code=error.code, message=error.message), left_s())
            raise
        # The other end is proved; its first frames may come right behind its last word.
        channel.trust()
        say(channel, proof, left_s())
        return side.on_end(heard(channel, Accepted | Refused, left_s()))
    except NotOfThisCluster as error:
        raise PeerRefused(error.message) from error


def say(channel: TcpChannel, message: object, timeout_s: float) -> None:
    """Sends a message of the handshake.

    Raises:
        PeerLost, PeerSilent: as ``Channel.send``.
    """
    channel.send(Frame(encode_msgpack(message), _NOTHING), timeout_s)


def heard(channel: TcpChannel, as_type: Any, timeout_s: float) -> Any:
    """The next message of the handshake.

    Raises:
        PeerLost, PeerSilent: as ``Channel.receive``.
        PeerRefused: it is none that belongs here.
    """
    try:
        return decode_msgpack(channel.receive(timeout_s).header, as_type)
    except MessageUndecodable as error:
        raise PeerRefused(f"what was said is no part of a handshake: {error.message}") from error
