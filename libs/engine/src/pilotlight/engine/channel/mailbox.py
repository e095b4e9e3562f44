"""Where an engine gets file descriptors from another one of its host.

A datagram socket with an abstract name, which is told over a channel whose other end has proved the
cluster's key. Whoever can see the host's sockets can send there, too: what counts is the datagram
with the words that came over the channel.
"""

import hmac
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

NONCE_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_BYTES = 64
"""Of a datagram that is looked at."""
MOST_DESCRIPTORS = 64
"""Of one datagram."""


class Mailbox:
    """One end's. It is closed after the first thing that it was made for has come."""

    def __init__(self) -> None:
        """Can be sent to from now on.

        Raises:
            OSError: the system gives no socket.
        """
        self._name = secrets.token_hex(NONCE_BYTES)
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._socket.bind(_bound_to(self._name))
        self.address = f"{_boot_id()}/{self._name}"
        """What the other end is told."""

    def fetch(self, nonce: bytes) -> int | None:
        """The descriptor that came with these words, which the caller closes; None: none did.

        What came with others is thrown away.
        """
        found = self.fetch_all(nonce, 1)
        return found[0] if found else None

    def fetch_all(self, nonce: bytes, count: int) -> list[int] | None:
        """As ``fetch``, of so many descriptors that came together."""
        while True:
            try:
                said, fds, _, _ = socket.recv_fds(
                    self._socket, _MOST_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                return None
            if len(fds) == count and hmac.compare_digest(said, nonce):
                for descriptor in fds:
                    os.set_inheritable(descriptor, False)  # Not every system minds the flag.
                return list(fds)
            for descriptor in fds:
                os.close(descriptor)

    def close(self) -> None:
        """Nothing comes any more. Closing twice is closing once."""
        self._socket.close()


def is_here(address: str) -> bool:
    """Whether a mailbox is one of this host, since it was started."""
    host, _, name = address.partition("/")
    return bool(host) and bool(name) and host == _boot_id()


def post(address: str, nonce: bytes, *descriptors: int) -> None:
    """Sends descriptors to a mailbox of this host; they stay the caller's, too.

    Raises:
        OSError: there is no such mailbox in this network namespace, or it is full, or these are too
            many.
    """
    if len(descriptors) > MOST_DESCRIPTORS:
        raise OSError(f"{len(descriptors)} descriptors do not go together")
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as sender:
        sender.connect(_bound_to(address.partition("/")[2]))
        socket.send_fds(sender, [nonce], descriptors)


def _bound_to(name: str) -> bytes:
    return b"\0pilotlight/" + name.encode()


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""
