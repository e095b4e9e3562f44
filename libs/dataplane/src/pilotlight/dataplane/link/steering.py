"""The thin part of ``pacing``: what Linux tells of a connection, and what it is told."""

import socket
from struct import Struct

from pilotlight.dataplane.link.pacing import Pacer, Reading

LOWER_EFFORT_TOS = 0x04
"""DSCP LE (RFC 8622): for networks whose switches let everything else go first."""
BULK_PRIORITY = 2
"""TC_PRIO_BULK: a host's own queue sends it last, where it has bands (pfifo_fast, prio, fq)."""

_INFO = Struct("=68x I 48x Q 20x I 16x Q")
"""Of ``struct tcp_info``: tcpi_rtt, tcpi_bytes_acked, tcpi_min_rtt, tcpi_busy_time. Fields are only
ever added behind the last one."""
_RATE = Struct("=Q")
SO_MAX_PACING_RATE = 47
"""Python has no name for it."""


def reading_of(sock: socket.socket) -> Reading | None:
    """How a TCP connection does; None: the system is a kernel before 4.10, which does not tell."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:
        return None
    rtt_us, acked_bytes, least_rtt_us, busy_us = _INFO.unpack(info)
    return Reading(
        acked_bytes=acked_bytes,
        busy_s=busy_us / 1e6,
        rtt_s=rtt_us / 1e6,
        least_rtt_s=least_rtt_us / 1e6,
    )


class Steering:
    """One connection whose bytes give way to others'."""

    def __init__(self, sock: socket.socket, pacer: Pacer | None = None) -> None:
        self._sock = sock
        self._pacer = pacer or Pacer()
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, LOWER_EFFORT_TOS)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, LOWER_EFFORT_TOS)
        # After the one above, which sets it too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK_PRIORITY)

    def look(self) -> None:
        """Have the connection send as fast as it should.

        To be called every few milliseconds of sending.
        """
        reading = reading_of(self._sock)
        if reading is None:
            return
        before = self._pacer.bytes_per_s
        self._pacer.read(reading)
        rate = self._pacer.bytes_per_s
        if rate is not None and rate != before:
            self._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, _RATE.pack(round(rate)))
