"""Bandwidth: how it is written, and a limit on what is taken from one source.

Links between nodes are in ``link``.
"""

import math
import re
from urllib.parse import urlsplit

from pilotlight.common.clock import Clock
from pilotlight.common.waiting import pause
from pilotlight.dataplane.fair_turns import Turn
from pilotlight.dataplane.priority_semaphore import (
    Permit,
    PrioritySemaphore,
    Rank,
    in_order_of_arrival,
)

LATE_S = 0.005
"""By how much a timer may be late without the link losing that time."""
QUANTUM_S = 0.02
"""For how long a read of a lower rank may keep the link from one of a higher rank."""

_BANDWIDTH = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kKmMgGtT]?)(?P<binary>i?)(?P<unit>[bB]it/s|[bB]it|bps|B/s)?"
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bandwidth(text: str) -> float | None:
    """Bytes per second of ``200mbit``, ``25g``, ``1000000`` (bits per second) or ``125MB/s``; None,
    no limit, for an empty text.

    Raises:
        ValueError: it is none of these, or it is zero.
    """
    if not text.strip():
        return None
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a bandwidth; give for example 200mbit, 25gbit or 125MB/s"
        )
    scale = (1024 if match["binary"] else 1000) ** _POWERS[match["prefix"].lower()]
    bits = 8 if match["unit"] == "B/s" else 1
    bytes_per_s = float(match["number"]) * scale * bits / 8
    if bytes_per_s <= 0:
        raise ValueError(
            f"{text!r}: a link needs a bandwidth above zero; give nothing for no limit"
        )
    return bytes_per_s


def link_of(uri: str) -> str:
    """What a model's bytes share their link with: a bucket, the hub, or the folders of this host
    together.
    """
    parts = urlsplit(uri)
    # A hub is one server, whatever the organisation.
    return f"{parts.scheme or 'file'}://{'' if parts.scheme == 'hf' else parts.netloc}"


def is_of_this_host(link: str) -> bool:
    """Whether what ``link_of`` names are folders of this host."""
    return link == "file://"


class LinkSchedule:
    """Hands out a link's time, first come, first served. Pure: time is an argument.

    A caller that comes back a moment late, as timers are, loses nothing by it.

    ::

        asked   A  B        C
        link    [A ....)[B ....)   [C ....)     each gets its bytes at the end of its time
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = -math.inf

    def take(self, now_s: float, size_bytes: int) -> float:
        """Seconds from now until these bytes have come over the link."""
        start_s = self._free_at_s if now_s - self._free_at_s <= LATE_S else now_s
        self._free_at_s = start_s + size_bytes / self._bytes_per_s
        return self._free_at_s - now_s


class BandwidthLimit:
    """What one source's link lets through."""

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._schedule = LinkSchedule(bytes_per_s) if bytes_per_s is not None else None
        self._clock = clock
        self._permits = PrioritySemaphore(1)
        self._asked = 0

    @property
    def is_none(self) -> bool:
        """Whether everything comes at once."""
        return self._schedule is None

    async def take(
        self, size_bytes: int, rank: Rank = in_order_of_arrival, turn: Turn | None = None
    ) -> None:
        """Return when these bytes have come over the link, at once where there is no limit.

        The higher rank comes first, also between the bytes of a lower one; among equals, the first
        that asked. ``turn`` counts what it lets through.
        """
        if self._schedule is None or self._bytes_per_s is None:
            return
        quantum_bytes = max(1, int(self._bytes_per_s * QUANTUM_S))
        self._asked += 1
        left, mine = size_bytes, self._asked
        permit: Permit | None = None
        try:
            while left > 0:
                before, permit = permit, None
                permit = await self._permits.take(lambda: (*rank(), mine), after=before)
                now = min(left, quantum_bytes)
                if turn is not None:
                    turn.took(now)
                await pause(self._schedule.take(self._clock.monotonic_s(), now))
                left -= now
        finally:
            if permit is not None:
                self._permits.give_back(permit)


class SourceLimits:
    """A limit for each source: a bucket, the hub, or the folders of this host together."""

    def __init__(self, bytes_per_s: float | None, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._limits: dict[str, BandwidthLimit] = {}

    def of(self, uri: str) -> BandwidthLimit:
        """The link over which a model's bytes come."""
        key = link_of(uri)
        if key not in self._limits:
            self._limits[key] = BandwidthLimit(self._bytes_per_s, self._clock)
        return self._limits[key]
