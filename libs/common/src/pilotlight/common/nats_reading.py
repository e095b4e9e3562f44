"""Messages of NATS, taken as their bytes come.

nats-py has a reader's buffer, a task that waits for it and a parser that awaits between a message's
bytes and the queue of its subscription. Most messages of a busy process have somebody who takes
them without waiting (``nats_client``): those are cut from what came and handed over in the same
call. Everything else, from the first byte of it on, goes nats-py's way, and what comes after it
does, too, until nats-py asks for more: so nothing overtakes.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import SupportsIndex

Take = Callable[[bytes], int]
"""Takes bytes at the beginning of what came, and says how many."""
Deliver = Callable[[int, bytes, bytes, bytes, bytes], bool]
"""Takes a message (subscription, subject, reply, payload, headers), or leaves it."""

_MSG_WORDS, _HMSG_WORDS = (4, 5), (5, 6)
"""Words of a control line, without and with a subject for the reply."""


class Reader(asyncio.StreamReader):
    """Offers what comes to ``take`` while its reader waits; what is not taken can be read."""

    def __init__(self, limit: int, take: Take) -> None:
        """``limit`` is asyncio's, in bytes."""
        super().__init__(limit=limit)
        self._take = take
        self._waits = False
        """Whoever reads has done with everything that came."""
        self._empty = False
        """The last ``read`` left nothing."""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        come = bytes(data)
        if self._waits:
            taken = self._take(come)
            if taken == len(come):
                return
            self._waits = False
            come = come[taken:] if taken else come
        super().feed_data(come)

    async def read(self, n: int = -1) -> bytes:
        self._waits = self._empty
        try:
            data = await super().read(n)
        finally:
            self._waits = False
        self._empty = n < 0 or len(data) < n
        return data


def cut(data: bytes, deliver: Deliver) -> int:
    """Hand over the messages at the beginning.

    Returns where the first thing stands that is no message, or not a whole one, or that
    ``deliver`` left.
    """
    at, end = 0, len(data)
    while at < end:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            break
        words = data[at:line_end].split()
        found = _sizes(words)
        if found is None:
            break
        reply, head_bytes, message_bytes = found
        head = line_end + 2
        stop = head + message_bytes
        if stop + 2 > end:
            break
        body = head + head_bytes
        if not deliver(int(words[2]), words[1], reply, data[body:stop], data[head:body]):
            break
        at = stop + 2
    return at


def _sizes(words: list[bytes]) -> tuple[bytes, int, int] | None:
    """Reply's subject, bytes of headers, bytes with headers; None of what is not a message."""
    count = len(words)
    if not count or not words[-1].isdigit():
        return None
    if words[0] == b"MSG" and count in _MSG_WORDS and words[2].isdigit():
        return (words[3] if count == _MSG_WORDS[1] else b""), 0, int(words[-1])
    if (
        words[0] == b"HMSG"
        and count in _HMSG_WORDS
        and words[2].isdigit()
        and words[-2].isdigit()
        and int(words[-2]) <= int(words[-1])
    ):
        return (words[3] if count == _HMSG_WORDS[1] else b""), int(words[-2]), int(words[-1])
    return None
