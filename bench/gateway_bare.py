"""The bare bound of ``bench/gateway.py``: what a gateway over NATS costs that does nothing else.

``serve PORT NATS_URL``: a raw ASGI application without authentication, text or records; it passes
the body on and what comes back. ``work NATS_URL``: answers with 32 messages of one token each, or
with one for a request that does not stream. ``backend PORT``: an HTTP server that answers at once,
for proxies that need one.
"""

import asyncio
import itertools
import os
import sys
from typing import Any, cast

import msgspec
import nats
import uvicorn
import uvloop
from nats.aio.msg import Msg

TOKENS = 32
SUBJECT = "infer.m"
_json = msgspec.json.Encoder()


def answer(kind: str, **choice: Any) -> bytes:
    """A chat completion, or a chunk of one."""
    ended = {"finish_reason": None, "index": 0, **choice}
    usage = {"prompt_tokens": 10, "completion_tokens": TOKENS, "total_tokens": 10 + TOKENS}
    document = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", "choices": [ended]}
    return _json.encode(document if kind.endswith("chunk") else {**document, "usage": usage})


def event(**choice: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + answer("chat.completion.chunk", **choice) + b"\n\n"


LAST = event(delta={}, finish_reason="length") + b"data: [DONE]\n\n"
WHOLE = answer(
    "chat.completion",
    message={"role": "assistant", "content": " tok" * TOKENS},
    finish_reason="length",
)
EVENTS = (
    event(delta={"role": "assistant", "content": ""}),
    *(event(delta={"content": f" tok{number}"}) for number in range(TOKENS)),
    LAST,
)
STREAM_HEADERS = [(b"content-type", b"text/event-stream")]


class Bare:
    """The application. Answers come to one subject, by request."""

    def __init__(self, nats_url: str) -> None:
        self._nats_url = nats_url
        self._inbox = f"rx.{os.urandom(6).hex()}."
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Queue[bytes]] = {}

    async def _take(self, message: Msg) -> None:
        queue = self._waiting.get(message.subject.removeprefix(self._inbox))
        if queue is not None:
            queue.put_nowait(message.data)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            self._bus = await nats.connect(self._nats_url)
            await self._bus.subscribe(
                self._inbox + "*", cb=self._take, pending_msgs_limit=-1, pending_bytes_limit=-1
            )
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        key, queue = str(next(self._numbers)), asyncio.Queue[bytes]()
        self._waiting[key] = queue
        try:
            await self._bus.publish(SUBJECT, body, reply=self._inbox + key)
            await self._answer(msgspec.json.decode(body).get("stream", False), queue, send)
        finally:
            del self._waiting[key]

    async def _answer(self, stream: bool, queue: asyncio.Queue[bytes], send: Any) -> None:
        if not stream:
            whole = await queue.get()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(whole)).encode()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": whole})
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        token = b"more"
        while token:
            events: list[bytes] = []
            token = await queue.get()
            while token:
                events.append(event(delta={"content": token.decode()}))
                if queue.empty():
                    break
                token = queue.get_nowait()
            if not token:
                events.append(LAST)
            sent = {
                "type": "http.response.body",
                "body": b"".join(events),
                "more_body": bool(token),
            }
            await send(sent)


async def work(nats_url: str, token_s: float) -> None:
    """The worker."""
    bus = await nats.connect(nats_url)
    running: set[asyncio.Task[None]] = set()

    async def respond(message: Msg) -> None:
        if not msgspec.json.decode(message.data).get("stream", False):
            await bus.publish(message.reply, WHOLE)
            return
        for number in range(TOKENS):
            await bus.publish(message.reply, b" tok%d" % number)
            await asyncio.sleep(token_s)
        await bus.publish(message.reply, b"")

    async def take(message: Msg) -> None:
        task = asyncio.create_task(respond(message))
        running.add(task)
        task.add_done_callback(running.discard)

    await bus.subscribe(SUBJECT, cb=take)
    await asyncio.Event().wait()


class Backend(asyncio.Protocol):
    """Answers what came whole, without reading much of it."""

    def __init__(self) -> None:
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one by what it does, not by its type.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head = self._got.find(b"\r\n\r\n") + 4
        if head < 4:
            return
        named = self._got.lower().find(b"\r\ncontent-length:", 0, head)
        length = int(self._got[named + 17 : self._got.find(b"\r", named + 2)]) if named >= 0 else 0
        if len(self._got) < head + length:
            return
        streamed = b'"stream":true' in self._got.replace(b" ", b"")
        get = self._got.startswith(b"GET")
        self._got = b""
        if streamed:
            chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in EVENTS]
            headed = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self._transport.writelines([b"HTTP/1.1 200 OK\r\n", headed, *chunks, b"0\r\n\r\n"])
            return
        body = b'{"object":"list","data":[{"id":"m","object":"model"}]}' if get else WHOLE
        headed = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.writelines([b"HTTP/1.1 200 OK\r\n", headed, body])


async def backend(port: int) -> None:
    """The HTTP server behind proxies."""
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port)
    await server.serve_forever()


def main(role: str, *words: str) -> None:
    """One process."""
    if role == "serve":
        uvicorn.run(
            Bare(words[1]), host="127.0.0.1", port=int(words[0]), log_level="warning", loop="uvloop"
        )
    elif role == "work":
        uvloop.run(work(words[0], float(words[1])))
    else:
        uvloop.run(backend(int(words[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
