"""Reading ranges over a network: a connection that breaks is made again, and the range goes on at
the byte where it broke.

::

    range       [................................)
    try 0       [########x                            broke
    try 1                [###########x                broke
    try 2                            [###########)    whole
"""

import random
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from pilotlight.checkpoint.errors import SourceUnavailable
from pilotlight.checkpoint.reader import (
    BufferedSource,
    Progress,
    SourceFile,
    check_range,
    rest,
    unhurried,
    unobserved,
)
from pilotlight.common.waiting import Backoff, block

TRIES = 6
"""For one range of some megabytes. A server that breaks off that often is not one to wait for."""


class Broken(Exception):
    """A request failed in a way that may pass."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a source is waited for."""

    stall_timeout_s: float = 10.0
    """A connection that gives no byte for this long is given up, and made again."""
    tries: int = TRIES
    backoff: Backoff = field(default=Backoff(first_s=0.1, limit_s=3.0))


class RangedSource(BufferedSource):
    """A source whose bytes come in answers to requests for ranges."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._rng = random.Random()

    @abstractmethod
    def stream(self, file: SourceFile, start: int, stop: int) -> Generator[bytes]:
        """[start, stop) of a file, which is not empty, in pieces as they arrive; only of the very
        version that was listed.

        Raises:
            Broken: asking again may help.
            CheckpointError: it will not.
        """

    def pieces(
        self, file: SourceFile, offset: int, size_bytes: int, check: Callable[[], None] = unhurried
    ) -> Generator[memoryview]:
        """As ``Source.pieces``."""
        check_range(file, offset, size_bytes)
        stop = offset + size_bytes
        for attempt in range(self._patience.tries):
            check()
            try:
                with closing(
                    self.stream(file, offset, stop) if offset < stop else _nothing()
                ) as stream:
                    for piece in stream:
                        if len(piece) > stop - offset:
                            raise SourceUnavailable(
                                "the server sends more than it was asked for", file=file.name
                            )
                        offset += len(piece)
                        with memoryview(piece) as view:
                            yield view
                if offset == stop:
                    return
                broken = Broken(f"the answer ended {stop - offset} bytes early")
            except Broken as error:
                broken = error
            self._wait(attempt, broken, file)

    def read_into(
        self,
        file: SourceFile,
        offset: int,
        buffers: Sequence[memoryview],
        progress: Progress = unobserved,
    ) -> None:
        """As ``Source.read_into``."""
        left = rest(buffers, 0)
        with closing(
            self.pieces(file, offset, sum(map(len, buffers)), lambda: progress(0))
        ) as pieces:
            for piece in pieces:
                left = _put(left, piece)
                progress(len(piece))

    def _wait(self, attempt: int, broken: Broken, file: SourceFile | None = None) -> None:
        """Let time pass before the next try.

        Raises:
            SourceUnavailable: there is none.
        """
        name = None if file is None else file.name
        if attempt + 1 == self._patience.tries:
            raise SourceUnavailable(
                f"{broken}, {self._patience.tries} times", file=name
            ) from broken
        delay_s = self._patience.backoff.delay_s(attempt, self._rng)
        asked_s = broken.retry_after_s or 0.0
        if asked_s > self._patience.stall_timeout_s:
            raise SourceUnavailable(
                f"{broken}; the server wants to be left alone for {asked_s:g} s", file=name
            ) from broken
        block(max(delay_s, asked_s))


def _nothing() -> Generator[bytes]:
    yield from ()


def _put(buffers: list[memoryview], piece: memoryview) -> list[memoryview]:
    """Copy a piece to where it belongs; what is left to fill."""
    done, size_bytes = 0, len(piece)
    while done < size_bytes:
        part = min(len(buffers[0]), size_bytes - done)
        buffers[0][:part] = piece[done : done + part] if part < size_bytes else piece
        done += part
        buffers = rest(buffers, part)
    return buffers
