"""What a connection is to a client: half-closed, of an older HTTP, with a body that is late, too
much, or encoded.
"""

import asyncio
import itertools
import json
import socket
import struct

import pytest

from pilotlight.common.testing import until
from pilotlight.gateway.edge import connection
from pilotlight.gateway.serving.testing import entries_of
from pilotlight.gateway.testing import API_KEY

pytestmark = pytest.mark.anyio

WHOLE = {"model": "fox", "prompt": "x", "max_tokens": 100}
STREAM = {**WHOLE, "stream": True}
ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."


def request(body=WHOLE, *headers, version="1.1", path="/v1/completions", key=API_KEY, length=None):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: x", f"authorization: Bearer {key}", *headers]
    if length != "none":
        lines.append(f"content-length: {len(content) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + content


class Client:
    """A client that says bytes, and reads them."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, world):
        return cls(*await asyncio.open_connection("127.0.0.1", world.server.port))

    async def say(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self):
        async with asyncio.timeout(20):
            return await self.reader.read()

    def reset(self):
        self.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self.writer.transport.abort()


async def ask(world, data):
    """Everything that comes back for these bytes, to the end of the connection."""
    client = await Client.of(world)
    try:
        await client.say(data)
        return await client.rest()
    finally:
        client.writer.close()


def parted(answer):
    """An answer's status, its headers and its body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return (
        int(first.split()[1]),
        {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)},
        body,
    )


def unchunked(body):
    """The content of a chunked body that is whole."""
    content = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            assert body == b"\r\n"
            return content
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]


async def endless(world):
    """A worker whose engine never ends anything by itself, and says nothing more after its text."""
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, world.ids(ANSWER), finish=None)
    return worker


async def slow(world):
    """A worker that says nothing until it is told."""
    worker = await world.worker()
    worker.post = lambda ran: []
    return worker


async def test_a_client_that_half_closes_gets_its_answer(world):
    worker = await slow(world)
    for version, body in itertools.product(("1.0", "1.1"), (WHOLE, STREAM)):
        client = await Client.of(world)
        await client.say(request(body, version=version))
        client.writer.write_eof()
        await worker.until(lambda: worker.ran)
        (ran,) = worker.ran.values()
        # Long enough for it to be taken for one that is gone, were it so.
        assert await client.reader.readexactly(2) == b"HT"
        assert not ran.cancelled
        await worker.send(ran, ran.entries)
        status, headers, content = parted(b"HT" + await client.rest())
        client.writer.close()
        assert status == 200
        assert headers["connection"] == "close"
        content = unchunked(content) if "transfer-encoding" in headers else content
        if body is STREAM:
            assert content.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"][0]["text"] == ANSWER
        worker.ran.clear()
    assert [row["status"] for row in world.usage.rows] == ["ok"] * 4


async def test_what_was_asked_at_once_is_all_answered(world):
    await world.worker()
    client = await Client.of(world)
    await client.say(request() + request(STREAM) + request())
    client.writer.write_eof()
    answers = await client.rest()
    client.writer.close()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3


async def test_a_client_that_is_gone_is_noticed(world):
    worker = await slow(world)
    for how, body in itertools.product(("close", "reset", "half-close and close"), (WHOLE, STREAM)):
        client = await Client.of(world)
        await client.say(request(body))
        await worker.until(lambda: worker.ran)
        (ran,) = worker.ran.values()
        if how == "reset":
            client.reset()
        elif how == "close":
            client.writer.close()
        else:
            client.writer.write_eof()
            assert await client.reader.readexactly(1) == b"H"
            client.writer.close()
        await worker.until(lambda ran=ran: ran.cancelled)
        worker.ran.clear()
    await until(lambda: [row["status"] for row in world.usage.rows] == ["cancelled"] * 6)


async def test_a_client_that_leaves_in_its_stream_is_noticed_while_nothing_is_said(world):
    worker = await endless(world)
    for version in ("1.0", "1.1"):
        client = await Client.of(world)
        await client.say(request(STREAM, version=version))
        await client.reader.readuntil(b"dogs.")
        (ran,) = worker.ran.values()
        client.writer.write_eof()
        # It is still there, and is sent nothing that its events would not allow.
        comment = b":\n\n" if version == "1.0" else b"3\r\n:\n\n\r\n"
        assert (await client.reader.readuntil(comment)).startswith(b'"')
        assert not ran.cancelled
        client.writer.close()
        await worker.until(lambda ran=ran: ran.cancelled)
        worker.ran.clear()


async def test_half_a_request_is_none(world):
    client = await Client.of(world)
    await client.say(request(length=1000))
    client.writer.write_eof()
    assert await client.rest() == b""
    client.writer.close()


async def test_an_older_client_gets_no_chunks(world):
    await world.worker()
    for header, body in itertools.product(
        ("connection: keep-alive", "expect: 100-continue", "x: y"), (WHOLE, STREAM, {})
    ):
        status, told, content = parted(await ask(world, request(body, header, version="1.0")))
        assert status == (200 if body else 400)
        assert "transfer-encoding" not in told
        assert told["connection"] == "close"
        if body is STREAM:
            assert "content-length" not in told
            assert content.startswith(b"data: ")
            assert content.endswith(b"\n\ndata: [DONE]\n\n")
        else:
            assert len(content) == int(told["content-length"])


async def test_a_stream_of_todays_clients_is_chunked(world):
    await world.worker()
    status, told, content = parted(await ask(world, request(STREAM, "connection: close")))
    assert (status, told["transfer-encoding"]) == (200, "chunked")
    assert unchunked(content).endswith(b"data: [DONE]\n\n")


async def test_encoded_bodies_are_refused(world):
    await world.worker()
    for header, expected in (("gzip", 415), ("identity, br", 415), ("Identity", 200), ("", 200)):
        answer = await ask(
            world, request(WHOLE, f"Content-Encoding: {header}", "connection: close")
        )
        status, told, content = parted(answer)
        assert (header, status) == (header, expected)
        if expected == 415:
            assert json.loads(content)["error"]["code"] == "unsupported_encoding"
            assert (told["accept-encoding"], told["x-should-retry"]) == ("identity", "false")


async def test_bodies_in_codings_of_the_transfer_are_refused(world):
    await world.worker()
    chunked = b"5\r\nabcde\r\n0\r\n\r\n"
    for coding, expected in (("gzip, chunked", 415), ("gzip", 400), ("chunked, chunked", 400)):
        status, _, content = parted(
            await ask(
                world,
                request(
                    chunked, f"transfer-encoding: {coding}", "connection: close", length="none"
                ),
            )
        )
        assert (coding, status) == (coding, expected)
        assert json.loads(content)["error"]["type"] == "invalid_request_error"
    status, _, _ = parted(
        await ask(world, request(chunked, "transfer-encoding: chunked", length=5))
    )
    assert status == 400


async def test_what_is_no_http_is_answered_in_json(world):
    status, told, content = parted(await ask(world, b"HELO example.org\r\n\r\n"))
    assert (status, told["connection"]) == (400, "close")
    assert json.loads(content)["error"]["code"] == "invalid_request"


async def test_a_refusal_can_be_read_while_the_body_still_comes(world):
    client = await Client.of(world)
    body = b" " * (4 * 1024 * 1024)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connection, "LINGER_S", 2.0)
        await client.say(request(body, key="nobody"))
        status, told, content = parted(await client.rest())
    client.writer.close()
    assert (status, told["connection"]) == (401, "close")
    assert json.loads(content)["error"]["code"] == "invalid_api_key"


async def test_a_body_that_waits_to_be_asked_for(world):
    await world.worker()
    for key, first in (
        (API_KEY, b"HTTP/1.1 100 Continue"),
        ("nobody", b"HTTP/1.1 401 Unauthorized"),
    ):
        client = await Client.of(world)
        head, _, body = request(WHOLE, "expect: 100-continue", key=key).partition(b"\r\n\r\n")
        await client.say(head + b"\r\n\r\n")
        assert (await client.reader.readline()).rstrip() == first
        if key == API_KEY:
            await client.reader.readline()
            await client.say(body)
            assert (await client.reader.readline()).rstrip() == b"HTTP/1.1 200 OK"
        client.writer.close()


async def test_a_body_that_pauses_is_ended(make_world):
    world = await make_world(body_pause_s=0.2)
    for framing in ("content-length: 1000", "transfer-encoding: chunked"):
        begun = b"5\r\n{    \r\n" if "chunked" in framing else b"{    "
        status, told, content = parted(await ask(world, request(begun, framing, length="none")))
        assert (status, told["connection"]) == (408, "close")
        error = json.loads(content)["error"]
        assert error["code"] == "body_timeout"
        assert "for 0.2 s, after 5" in error["message"]
        await until(lambda: not world.bodies.held_bytes)


async def test_bodies_share_one_budget(make_world):
    world = await make_world(bodies_bytes=4 * 1024 * 1024)
    await world.worker()
    large = b" " * 1_250_000
    first = await Client.of(world)
    await first.say(request(large[:-1], length=len(large)))
    await until(lambda: world.bodies.held_bytes == len(large))
    status, told, content = parted(await ask(world, request(large)))
    assert (status, told["retry-after"], told["x-should-retry"]) == (429, "1", "true")
    assert json.loads(content)["error"]["code"] == "bodies_full"
    status, _, _ = parted(await ask(world, request(WHOLE, "connection: close")))
    assert status == 200, "small ones are not shut out"
    await first.say(b"}")
    status, _, _ = parted(await first.reader.readuntil(b"\r\n\r\n"))
    assert status == 400
    first.writer.close()
    await until(lambda: not world.bodies.held_bytes)


async def test_a_body_that_decodes_to_too_much_is_refused(make_world):
    world = await make_world(bodies_bytes=4 * 1024 * 1024)
    lists = b'{"model":"fox","prompt":[' + b"[]," * 30_000 + b"[]]}"
    status, _, content = parted(await ask(world, request(lists, "connection: close")))
    assert status == 413
    assert "once it is decoded" in json.loads(content)["error"]["message"]
    await until(lambda: not world.bodies.held_bytes)


async def test_a_stream_holds_no_body(world):
    worker = await endless(world)
    client = await Client.of(world)
    await client.say(request(STREAM))
    await worker.until(lambda: worker.ran)
    await client.reader.readuntil(b"dogs.")
    assert world.bodies.held_bytes == 0
    client.writer.close()


async def test_requests_of_one_connection_come_in_whatever_parts(world):
    client, asked = await Client.of(world), request({"model": "nope", "prompt": "x"})
    # One ends with the beginning of the next, and lines without anything come between.
    for part, is_whole in (
        (asked + b"\r\nPOS", True),
        (asked[3:] + b"\r\n", True),
        (asked[:-4], False),
        (asked[-4:], True),
    ):
        await client.say(part)
        if is_whole:
            async with asyncio.timeout(20):
                head = await client.reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                assert b"model_not_found" in await client.reader.readexactly(length)
            assert head.startswith(b"HTTP/1.1 404 ")
    client.writer.close()
