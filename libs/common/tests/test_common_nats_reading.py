"""Messages that are taken as their bytes come, beside what nats-py's parser makes of them."""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from pilotlight.common.nats_reading import Reader, cut

AT_ONCE = frozenset({1, 3})
"""Subscriptions whose messages somebody takes."""
HEADERS = b"NATS/1.0\r\nA: b\r\n\r\n"
READ_BYTES = 64
"""Less than some messages: nats-py reads in parts."""


@dataclass
class Client:
    """What nats-py's parser tells a client, in order."""

    heard: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])
    at_once: int = 0
    turns: int = 0
    """Of the loop that telling takes."""

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.heard.append((sid, bytes(subject), bytes(reply), data, headers or b""))

    async def _process_ping(self) -> None:
        self.heard.append(("ping",))

    async def _process_pong(self) -> None:
        self.heard.append(("pong",))

    def deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> bool:
        if sid not in AT_ONCE:
            return False
        self.at_once += 1
        self.heard.append((sid, subject, reply, data, headers))
        return True


async def read(parts: list[tuple[bytes, bool]], *, short: bool, turns: int = 0) -> Client:
    """What a client hears of bytes that come in parts, with turns of the loop between some."""
    client = Client(turns=turns)
    parser = Parser(client)

    def take(data: bytes) -> int:
        if not short or parser.buf or parser.state != AWAITING_CONTROL_LINE:
            return 0
        return cut(data, client.deliver)

    reader = Reader(1 << 20, take)

    async def read_all() -> None:
        while not reader.at_eof():
            await parser.parse(await reader.read(READ_BYTES))

    reading = asyncio.create_task(read_all())
    await asyncio.sleep(0)
    for data, pause in parts:
        reader.feed_data(data)
        if pause:
            await asyncio.sleep(0)
    reader.feed_eof()
    await reading
    return client


def message(sid: int, data: bytes, reply: bool, headers: bool) -> bytes:
    words = [b"subject.%d" % sid, b"%d" % sid, *([b"answer"] if reply else [])]
    if not headers:
        return b"MSG %b %d\r\n%b\r\n" % (b" ".join(words), len(data), data)
    sizes = len(HEADERS), len(HEADERS) + len(data)
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (b" ".join(words), *sizes, HEADERS, data)


payloads = st.binary(max_size=100) | st.sampled_from([b"MSG a 1 2\r\n", b"\r\n", b"PING\r\n"])
things = st.one_of(
    st.builds(message, st.integers(1, 4), payloads, st.booleans(), st.booleans()),
    st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n"]),
)


@settings(max_examples=200, deadline=None)
@given(
    stream=st.lists(things, max_size=12).map(b"".join),
    places=st.lists(st.tuples(st.integers(0, 1500), st.booleans()), max_size=8),
    turns=st.integers(0, 2),
)
def test_whatever_comes_in_whatever_parts_is_heard_as_nats_py_hears_it(
    stream: bytes, places: list[tuple[int, bool]], turns: int
) -> None:
    cuts = sorted(dict(places).items())
    begins = [0, *(at for at, _ in cuts)]
    ends = [*(at for at, _ in cuts), len(stream)]
    pauses = [*(pause for _, pause in cuts), True]
    parts = [
        (stream[begin:end], pause)
        for begin, end, pause in zip(begins, ends, pauses, strict=True)
        if stream[begin:end]
    ]
    expected = asyncio.run(read([(stream, True)] if stream else [], short=False))
    assert asyncio.run(read(parts, short=True, turns=turns)).heard == expected.heard


def test_messages_that_come_whole_pass_no_parser() -> None:
    stream = b"".join(message(1, b"%d" % number, number % 2 == 0, True) for number in range(9))
    # The first that comes is nats-py's: of what came before it asked, something may be left.
    client = asyncio.run(read([(b"PING\r\n", True), (stream, False), (stream, True)], short=True))
    assert client.at_once == 18
    assert len(client.heard) == 19


def test_nothing_is_taken_of_what_is_no_message() -> None:
    for line in (
        b"",
        b"PING\r\n",
        b"MSG\r\n",
        b"MSG a b 1\r\nx\r\n",
        b"MSG a 1 -1\r\n\r\n",
        b"MSG a 1 9\r\nshort\r\n",
        b"HMSG a 1 9 3\r\nabc\r\n",
        b"-ERR 'no'\r\n",
        message(2, b"x", reply=False, headers=False),
    ):
        assert cut(line, Client().deliver) == 0
