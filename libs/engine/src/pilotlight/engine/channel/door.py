"""Where a node listens for channels from others: a peer is let in once it has proved the cluster's
key, and not before.

Nothing goes on between calls of ``accept`` and ``guests``: connections wait in the system's queue,
which is bounded. Within one, all that came are looked at in turns, so that none can hold up
another: a peer that says nothing, or a byte a second, is sent away after a while.

::

    connected ── Hello ──> met ── Proof ──> arrived ── accept(about) ──> the stage that waits for it
        │ too slow, nonsense, another key     │ no stage asks for it
        v                                     v
      refused                               let go
"""

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pilotlight.common.errors import PeerRefused as NotOfThisCluster
from pilotlight.common.handshake import Identity, Responder
from pilotlight.common.messages.link import Accepted, Hello, Proof, Refused
from pilotlight.engine.channel.channel import WINDOW_FRAMES
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.channel.tcp import TcpChannel, heard, say
from pilotlight.engine.errors import PeerLost, PeerRefused, PeerSilent

BACKLOG = 64
MAX_AT_ONCE = 64
"""Connections within their handshake, and as many behind it. The oldest goes when one more comes: a
handshake takes milliseconds."""
HANDSHAKE_S = 5.0
HELD_S = 60.0
"""How long a channel is kept that no stage asks for: a stage may come a little before the one that
waits for it."""


@dataclass(slots=True, eq=False)
class _Guest:
    channel: TcpChannel
    side: Responder
    until_s: float
    """When it is let go."""


class Door:
    """A listening socket, for one thread."""

    def __init__(
        self,
        me: Identity,
        address: tuple[str, int],
        monotonic_s: Callable[[], float],
        *,
        on_refused: Callable[[str], None] = lambda why: None,
        handshake_s: float = HANDSHAKE_S,
        window: int = WINDOW_FRAMES,
        devices: Devices | None = None,
    ) -> None:
        """Listens.

        Args:
            me: what this node proves.
            address: host and port; port 0 means any.
            monotonic_s: the clock of deadlines.
            on_refused: hears why a peer was sent away.
            handshake_s: what a handshake may take.
            window: of the channels.
            devices: this process's device, where payloads may go from device to device.

        Raises:
            OSError: the address cannot be had.
        """
        self._me = me
        self._monotonic_s = monotonic_s
        self._on_refused = on_refused
        self._handshake_s = handshake_s
        self._window = window
        self._devices = devices
        self._strangers: list[_Guest] = []
        """Within their handshake, oldest first."""
        self._arrived: dict[str, _Guest] = {}
        """Behind it, by what they are about, oldest first."""
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server(address, family=family, backlog=BACKLOG)
        self._listener.setblocking(False)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def accept(self, about: str, timeout_s: float) -> TcpChannel:
        """The channel about this, once its other end has come.

        Raises:
            PeerSilent: it did not in time.
            PeerLost: the door is closed.
        """
        deadline_s = self._monotonic_s() + timeout_s
        while True:
            self._look()
            if about in self._arrived:
                return self._arrived.pop(about).channel
            left_s = deadline_s - self._monotonic_s()
            if left_s <= 0:
                raise PeerSilent(f"no peer came for {about} within {timeout_s} s")
            self.wait(left_s)

    def guests(self, about: str) -> tuple[TcpChannel, ...]:
        """The channels whose other ends have come about something that begins so. Each is given
        once.

        Raises:
            PeerLost: the door is closed.
        """
        self._look()
        mine = [one for one in self._arrived if one.startswith(about)]
        return tuple(self._arrived.pop(one).channel for one in mine)

    def wait(self, left_s: float, beside: int | None = None) -> None:
        """Until a peer comes, says something, or has been silent for too long.

        Args:
            left_s: at most so long.
            beside: a descriptor; it also ends when there is something to read.
        """
        poll = select.poll()
        if beside is not None:
            poll.register(beside, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for guest in self._strangers:
            poll.register(*guest.channel.interest())
        first_s = min(
            (guest.until_s for guest in self._strangers), default=self._monotonic_s() + left_s
        )
        poll.poll(max(1.0, min(left_s, first_s - self._monotonic_s()) * 1000))

    def close(self) -> None:
        """Listens no more, and closes the channels that no stage asked for.

        Closing twice is closing once.
        """
        self._listener.close()
        for guest in (*self._strangers, *self._arrived.values()):
            guest.channel.close()
        self._strangers.clear()
        self._arrived.clear()

    def _look(self) -> None:
        if self._listener.fileno() < 0:
            raise PeerLost("the door is closed")
        self._let_in()
        for guest in tuple(self._strangers):
            try:
                if self._hear(guest):
                    self._strangers.remove(guest)
                    self._keep(guest)
                elif self._monotonic_s() > guest.until_s:
                    raise PeerSilent(f"no handshake within {self._handshake_s} s")
            except PeerLost as error:
                self._strangers.remove(guest)
                self._refuse(guest, error.code, error.message)
        for about, guest in tuple(self._arrived.items()):
            if self._monotonic_s() > guest.until_s:
                self._arrived.pop(about).channel.close()

    def _let_in(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # No more peers; or this one has left.
            channel = TcpChannel(connection, self._monotonic_s, self._window)
            self._strangers.append(
                _Guest(channel, Responder(self._me), self._monotonic_s() + self._handshake_s)
            )
        while len(self._strangers) > MAX_AT_ONCE:
            self._refuse(self._strangers.pop(0), PeerRefused.code, "too many come at once")

    def _hear(self, guest: _Guest) -> bool:
        """Goes on with a handshake as far as it has come; True at its end.

        Raises:
            PeerLost: it has failed.
        """
        channel, side = guest.channel, guest.side
        while channel.readable:
            try:
                if side.peer is None:
                    say(channel, side.on_hello(heard(channel, Hello, 0)), 0)
                    continue
                message = heard(channel, Proof | Refused, 0)
                if isinstance(message, Refused):
                    raise PeerRefused(f"{side.peer} refuses this node: {message.message}")
                accepted = side.on_proof(message)
            except NotOfThisCluster as error:
                raise PeerRefused(error.message) from error
            channel.trust()
            say(channel, self._at_last(guest, accepted), 0)
            return True
        return False

    def _at_last(self, guest: _Guest, accepted: Accepted) -> Accepted:
        """The last word of a handshake: where descriptors come to, if the peer has said where its
        own do, and is on this host.
        """
        path = self._devices.path() if self._devices is not None and guest.side.device_at else None
        if path is None:
            return accepted
        if not path.meet(guest.side.device_at):
            path.close()
            return accepted
        guest.channel.carry(path)
        return Accepted(device_at=path.address)

    def _keep(self, guest: _Guest) -> None:
        before = self._arrived.pop(guest.side.about, None)
        if before is not None:
            before.channel.close()
        guest.until_s = self._monotonic_s() + HELD_S
        self._arrived[guest.side.about] = guest
        while len(self._arrived) > MAX_AT_ONCE:
            self._arrived.pop(next(iter(self._arrived))).channel.close()

    def _refuse(self, guest: _Guest, code: str, why: str) -> None:
        with suppress(PeerLost):
            say(guest.channel, Refused(code=code, message=why), 0)
        guest.channel.close()
        self._on_refused(why)
