"""Floods of bodies against the gateway of a whole system: what they do to its memory and to another
client.

Prints figures as JSON.
"""

import asyncio
import json
import os
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from embedded_system import RunningSystem

from pilotlight.common.clock import SystemClock
from pilotlight.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.hostile, pytest.mark.anyio]

MB = 1024 * 1024
BODY_BYTES = 8 * MB
BUDGET_BYTES = GatewaySettings.model_fields["bodies_bytes"].default
OVERHEAD_BYTES = 96 * MB
"""Beside the budget: what 400 connections take, buffers, one body that is being copied, and what is
left between blocks that are used."""
DEADLINE_S = 120.0
LOOK_S = 0.05
SETTLED_S = 4.0


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


def head(system: RunningSystem, length: int | None) -> bytes:
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {key_of(system)['authorization']}\r\n"
        f"content-type: application/json\r\n{framing}\r\n\r\n"
    ).encode()


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


async def settled(watch: Watch) -> int:
    """The memory some time after a flood: longer than the gateway takes to give back what it
    freed.
    """
    await asyncio.sleep(SETTLED_S)
    return watch.now_bytes


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
async def test_400_bodies_of_8_mb_that_never_end(
    fresh_system: RunningSystem, announced: bool
) -> None:
    part = b" " * (MB // 4)
    if announced:
        pieces = [head(fresh_system, BODY_BYTES), *[part] * (BODY_BYTES // len(part) - 1), part[1:]]
    else:
        pieces = [
            head(fresh_system, None),
            *[b"%x\r\n%b\r\n" % (len(part), part)] * (BODY_BYTES // len(part)),
        ]
    watch = Watch(fresh_system)
    async with watch.watching():
        statuses = Counter(
            await asyncio.wait_for(
                asyncio.gather(*[send(fresh_system, *pieces) for _ in range(400)]), DEADLINE_S
            )
        )
        after_bytes = await settled(watch)
    name = f"400 unfinished bodies of 8 MiB, {'announced' if announced else 'chunked'}"
    print(json.dumps(watch.figures(name, statuses, after_bytes)))
    assert watch.peak_bytes - watch.before_bytes < BUDGET_BYTES + OVERHEAD_BYTES
    assert after_bytes - watch.before_bytes < OVERHEAD_BYTES
    assert set(watch.answers) == {200}
    assert sum(watch.answers.values()) > 10
    # 0: a client that goes on sending for long after its answer is cut off, and may not have read
    # it.
    assert set(statuses) <= {0, 408, 429}
    assert statuses[408]
    assert statuses[429]


async def test_6_bodies_of_8_mb_of_spaces(fresh_system: RunningSystem) -> None:
    """Their tokens are far more than any context has: they are refused, and what they took is given
    back.
    """
    prompt = b'{"model": "ember-7m", "max_tokens": 1, "prompt": "%b"}' % (b" " * (BODY_BYTES - 64))
    watch = Watch(fresh_system)
    async with watch.watching():
        asked = [send(fresh_system, head(fresh_system, len(prompt)), prompt) for _ in range(6)]
        statuses = Counter(await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S))
        after_bytes = await settled(watch)
    print(json.dumps(watch.figures("6 bodies of 8 MiB of spaces", statuses, after_bytes)))
    assert set(statuses) <= {400, 429}
    assert statuses[400]
    assert watch.peak_bytes - watch.before_bytes < BUDGET_BYTES + OVERHEAD_BYTES
    assert after_bytes - watch.before_bytes < OVERHEAD_BYTES
    assert set(watch.answers) == {200}
