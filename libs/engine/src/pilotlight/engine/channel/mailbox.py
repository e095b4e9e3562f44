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
_MOST_BYTES, _MOST_FDS = 64, 4
"""Of a datagram that is looked at."""


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
        found: int | None = None
        while found is None:
            try:
                said, fds, _, _ = socket.recv_fds(
                    self._socket, _MOST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                return None
            if len(fds) == 1 and hmac.compare_digest(said, nonce):
                found = fds.pop()
                os.set_inheritable(found, False)  # Not every system minds the flag.
            for descriptor in fds:
                os.close(descriptor)
        return found

    def close(self) -> None:
        """Nothing comes any more. Closing twice is closing once."""
        self._socket.close()


def is_here(address: str) -> bool:
    """Whether a mailbox is one of this host, since it was started."""
    host, _, name = address.partition("/")
    return bool(host) and bool(name) and host == _boot_id()


def post(address: str, nonce: bytes, descriptor: int) -> None:
    """Sends a descriptor to a mailbox of this host; it stays the caller's, too.

    Raises:
        OSError: there is no such mailbox in this network namespace, or it is full.
    """
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as sender:
        sender.connect(_bound_to(address.partition("/")[2]))
        socket.send_fds(sender, [nonce], [descriptor])


def _bound_to(name: str) -> bytes:
    return b"\0pilotlight/" + name.encode()


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""
