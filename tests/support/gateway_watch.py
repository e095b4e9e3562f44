"""What goes on at the gateway of a whole system while it is attacked: its memory, and how another
client of the same key is answered.
"""

import asyncio
import os
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from embedded_system import RunningSystem

from pilotlight.common.clock import SystemClock

MB = 1024 * 1024
DEADLINE_S = 120.0
LOOK_S = 0.05


def gateway_pid(system: RunningSystem) -> int:
    (path,) = (system.home / "run").glob("gateway-*.sock")
    return int(path.stem.rpartition("-")[2])


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks at a gateway's memory all the time, and asks it a small question again and again, as
    one more client of the same key.
    """

    def __init__(self, system: RunningSystem) -> None:
        self._system = system
        self._pid = gateway_pid(system)
        self.before_bytes = 0
        self.peak_bytes = 0
        self.answers: Counter[int] = Counter()
        self.answer_s: list[float] = []

    @property
    def now_bytes(self) -> int:
        return rss_bytes(self._pid)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(
            base_url=self._system.url, headers=key_of(self._system), timeout=DEADLINE_S
        ) as http:
            self.answers[await self._ask(http)] += 1
            self.answers.clear()
            self.answer_s.clear()
            self.before_bytes = self.peak_bytes = self.now_bytes
            tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._ask_on(http))]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            await asyncio.sleep(LOOK_S)

    async def _ask_on(self, http: httpx2.AsyncClient) -> None:
        while True:
            self.answers[await self._ask(http)] += 1
            await asyncio.sleep(LOOK_S)

    async def _ask(self, http: httpx2.AsyncClient) -> int:
        clock = SystemClock()
        began_s = clock.monotonic_s()
        answer = await http.post(
            "/v1/completions", json={"model": "ember-7m", "prompt": "x", "max_tokens": 1}
        )
        self.answer_s.append(clock.monotonic_s() - began_s)
        return answer.status_code

    def figures(self, name: str, statuses: Counter[int], after_bytes: int) -> dict[str, object]:
        return {
            "flood": name,
            "statuses": {str(status): count for status, count in sorted(statuses.items())},
            "rss_before_mib": round(self.before_bytes / MB),
            "rss_peak_mib": round(self.peak_bytes / MB),
            "rss_after_mib": round(after_bytes / MB),
            "others_answers": {
                str(status): count for status, count in sorted(self.answers.items())
            },
            "others_median_s": round(statistics.median(self.answer_s), 4),
            "others_longest_s": round(max(self.answer_s), 4),
        }


def key_of(system: RunningSystem) -> dict[str, str]:
    return {"authorization": f"Bearer {system.key('api')}"}


async def send(system: RunningSystem, *pieces: bytes) -> int:
    """The status of the answer to these bytes; 0 when the connection ended without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(system.url.rpartition(":")[2]))
    try:
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()
