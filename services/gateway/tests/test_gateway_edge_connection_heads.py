"""The HTTP server's own limits: heads that never end, in bytes and in time."""

import asyncio
import json

import pytest

from pilotlight.gateway.edge import connection
from pilotlight.gateway.edge.connection import MAX_HEAD_BYTES

pytestmark = pytest.mark.anyio

START = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


async def answer_to(world, *pieces, count=1):
    """What comes back for these bytes until the server closes, or until ``count`` answers are
    there.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
    received = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        while received.count(b"ok\n") < count and (data := await reader.read(4096)):
            received += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return received


async def test_a_head_that_is_too_long_is_refused(world):
    endless = (b"x-%d: %s\r\n" % (number, b"a" * 8000) for number in range(1000))
    answer = await answer_to(world, START, *endless)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "headers_too_large"


async def test_a_head_that_does_not_come_is_cut_off(world, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_DEADLINE_S", 0.05)
    assert await answer_to(world) == b""
    assert await answer_to(world, START) == b""
    answered_first = await answer_to(world, START + b"\r\n" + START, count=2)
    assert answered_first.count(b"ok\n") == 1


async def test_many_requests_on_one_connection_have_a_head_each(world, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_DEADLINE_S", 5.0)
    request = START + b"x: " + b"a" * (MAX_HEAD_BYTES // 4) + b"\r\n\r\n"
    assert (await answer_to(world, *[request] * 8, count=8)).count(b"ok\n") == 8
