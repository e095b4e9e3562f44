"""Bodies that are almost requests, many of them, against a whole system: every one gets a right
status on a connection that goes on, and the gateway's memory stays where it was.

``make fuzz-bodies COUNT=100000 SEED=20`` says how many. Prints figures as JSON.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import RunningSystem
from fuzzed_bodies import Fuzzed, fuzzed

from pilotlight.common.clock import SystemClock

pytestmark = [pytest.mark.hostile, pytest.mark.anyio]

MODEL = "ember-7m"
COUNT = int(os.environ.get("PILOTLIGHT_FUZZ_BODIES", "5000"))
SEED = int(os.environ.get("PILOTLIGHT_FUZZ_SEED", "20"))
AT_ONCE = 16
WARMED = 0.2
"""Share of the bodies after which memory is looked at first: caches are filled by then."""
GROWTH_BYTES = 24 * 1024 * 1024
RIGHT = frozenset({200, 400, 404, 413, 429})
ANSWER_S = 60.0
LONGEST = 16 << 20
"""Bytes of an answer that is read whole."""


def gateway_rss_bytes(system: RunningSystem) -> int:
    (path,) = (system.home / "run").glob("gateway-*.sock")
    pid = int(path.stem.rpartition("-")[2])
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sender:
    """One client, on one connection for as long as the gateway keeps it."""

    def __init__(self, system: RunningSystem) -> None:
        self._port = int(system.url.rpartition(":")[2])
        self._key = system.key("api")
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.connections = 0

    async def send(self, one: Fuzzed) -> tuple[int, bytes]:
        """Status and body of the answer."""
        if self._ends is None:
            self._ends = await asyncio.open_connection("127.0.0.1", self._port, limit=LONGEST)
            self.connections += 1
        reader, writer = self._ends
        writer.write(
            f"POST {one.path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
            f"content-length: {len(one.body)}\r\n\r\n".encode()
            + one.body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in head:
            body = await reader.readuntil(b"0\r\n\r\n")
        else:
            length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
            body = await reader.readexactly(int(length))
        if b"connection: close" in head:
            self.end()
        return status, body

    def end(self) -> None:
        """Close the connection."""
        if self._ends is not None:
            self._ends[1].transport.abort()
            self._ends = None


async def send_all(
    sender: Sender, ahead: Iterator[Fuzzed], statuses: Counter[int], wrong: list[str]
) -> None:
    """Send what is next, until nothing is; wrong answers are noted."""
    for one in ahead:
        status, body = await asyncio.wait_for(sender.send(one), ANSWER_S)
        statuses[status] += 1
        if status not in RIGHT or (status != 200 and not json.loads(body)["error"]):
            wrong.append(f"{one} got {status} {body[:200]!r}")


async def test_fuzzed_bodies(fresh_system: RunningSystem) -> None:
    clock, statuses, wrong = SystemClock(), Counter[int](), list[str]()
    senders = [Sender(fresh_system) for _ in range(AT_ONCE)]
    bodies = list(fuzzed(MODEL, SEED, COUNT))
    warm = int(COUNT * WARMED)
    began_s = clock.monotonic_s()
    rss: list[int] = []
    for part in (bodies[:warm], bodies[warm:]):
        ahead = iter(part)
        await asyncio.gather(*[send_all(sender, ahead, statuses, wrong) for sender in senders])
        rss.append(gateway_rss_bytes(fresh_system))
    figures = {
        "bodies": COUNT,
        "seed": SEED,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "connections": sum(sender.connections for sender in senders),
        "seconds": round(clock.monotonic_s() - began_s, 1),
        "rss_warm_mib": round(rss[0] / 2**20, 1),
        "rss_after_mib": round(rss[1] / 2**20, 1),
    }
    print(json.dumps(figures))
    print("\n".join(wrong[:20]))
    for sender in senders:
        sender.end()
    assert wrong == []
    assert rss[1] - rss[0] < GROWTH_BYTES, figures
