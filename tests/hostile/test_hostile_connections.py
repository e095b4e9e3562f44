"""Many hostile connections at once against a whole system: each is answered as it should be,
another client is served meanwhile, and the gateway's memory is flat.

Prints figures as JSON.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from embedded_system import RunningSystem
from gateway_watch import DEADLINE_S, MB, Watch, key_of, send

from pilotlight.gateway.edge.bodies import TRIM_BYTES

pytestmark = [pytest.mark.hostile, pytest.mark.anyio]

AT_ONCE = 100
PIPELINED = 50
DEPTH = 100_000
LONG_BYTES = 20_000
"""Of a body whose client closes its side."""
PEAK_BYTES = 64 * MB
"""While they come: a part of each, up to 256 KB, is read before anything is known of it."""
KEPT_BYTES = TRIM_BYTES + 16 * MB
"""What was freed is given back to the system as soon as it is so much, and not before."""
SETTLED_S = 4.0
SLOW_S = 0.5
"""Between two bytes of a slow client, whose head the gateway waits for 30 s."""


def post(system: RunningSystem, body: bytes, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: {key_of(system)['authorization']}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def slow_head(system: RunningSystem) -> int:
    """A head, byte by byte: 0 when the connection is ended, and it has to be."""
    port = int(system.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ended = asyncio.ensure_future(reader.read())
    writer.write(b"GET /v1/models HTTP/1.1\r\nx: ")
    try:
        while not ended.done():
            writer.write(b"a")
            await asyncio.wait({ended}, timeout=SLOW_S)
        answer = ended.result()
        return int(answer.split()[1]) if answer else 0
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()


async def pipelined(system: RunningSystem) -> int:
    """Fifty requests in one piece; the status that all have, or else 0."""
    port = int(system.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = key_of(system)["authorization"]
    one = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: {key}\r\n"
    last = f"{one}connection: close\r\n\r\n"
    writer.write((f"{one}\r\n" * (PIPELINED - 1) + last).encode())
    try:
        answers = await reader.read()
        return 200 if answers.count(b"HTTP/1.1 200 OK\r\n") == PIPELINED else 0
    finally:
        writer.transport.abort()


async def half_closed(system: RunningSystem, request: bytes) -> int:
    """A request whose client closes its side behind it; the status, or 0 without an answer."""
    port = int(system.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        answer = await reader.read()
        return int(answer.split()[1]) if answer else 0
    finally:
        writer.transport.abort()


def attack(name: str, system: RunningSystem) -> Coroutine[Any, Any, int]:
    line = b"x: " + b"a" * (MB // 4 - 5) + b"\r\n"
    deep = b'{"model": "ember-7m", "prompt": ' + b"[" * DEPTH + b"]" * DEPTH + b"}"
    long = json.dumps({"model": "ember-7m", "prompt": "x", "pad": "x" * LONG_BYTES}).encode()
    broken = b'{"model": "ember-7m", "prompt": "\xff\xfe\xc0\x80"}'
    match name:
        case "slow heads":
            return slow_head(system)
        case "pipelines":
            return pipelined(system)
        case "headers of 10 MB":
            return send(system, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n", *[line] * 40)
        case "half-closed bodies":
            return half_closed(system, post(system, long, "/tokenize")[:-1])
        case "half-closed requests":
            return half_closed(system, post(system, long, "/tokenize"))
        case "deep JSON":
            return send(system, post(system, deep))
        case _:
            return send(system, post(system, broken))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("slow heads", {0}),
        ("pipelines", {200}),
        # 0: a client that goes on sending after its answer may be cut off before it has read it.
        ("headers of 10 MB", {0, 431}),
        # Half a request is none: the connection ends without an answer.
        ("half-closed bodies", {0}),
        ("half-closed requests", {200}),
        # 429: bodies of one key have half of the memory for them.
        ("deep JSON", {400, 429}),
        ("no UTF-8", {400}),
    ],
)
async def test_hostile_connections(fresh_system: RunningSystem, name: str, right: set[int]) -> None:
    watch, rounds = Watch(fresh_system), 1 if name == "slow heads" else 5
    statuses = Counter[int]()
    async with watch.watching():
        settled = [watch.now_bytes]
        for _ in range(rounds):
            attacks = [attack(name, fresh_system) for _ in range(AT_ONCE)]
            statuses.update(await asyncio.wait_for(asyncio.gather(*attacks), DEADLINE_S))
            await asyncio.sleep(SETTLED_S)
            settled.append(watch.now_bytes)
    figures = watch.figures(f"{AT_ONCE} at a time: {name}", statuses, settled[-1])
    print(json.dumps({**figures, "rss_settled_mib": [round(each / MB) for each in settled]}))
    assert set(statuses) <= right
    assert statuses[max(right)] or right == {400, 429}
    assert set(watch.answers) == {200}
    assert watch.peak_bytes - watch.before_bytes < PEAK_BYTES
    assert max(settled) - watch.before_bytes < KEPT_BYTES
