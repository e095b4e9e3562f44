"""What lies between clients and the instance of ``bench/promises_device.py``: gateways, each of
which does one thing at a time.

What a gateway finds waiting when it is free it takes up together: such requests go through its
steps side by side (one event loop), so that the first of them leaves when nearly all are done, and
the others follow one by one. The figures are fitted to what clients of an H200's instance saw
(docs/benchmarks.md): when first tokens came at 64 and 128 concurrent, and the gateways' processor
time.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

GATEWAYS = 2
WAY_S = 0.0016
"""Between a client and a gateway, and between a gateway and the engine."""
REQUEST_S = 0.0018
"""Of a gateway, for a request."""
APART_S = (0.0002, 0.0008)
"""Of that, what is done for one after the other."""
UNLIKE = (0.9, 1.1)
TOKEN_S, FIRST_S, END_S = 42e-6, 100e-6, 100e-6
"""Of a gateway, for a token; for the first and last one, as much more."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, order=True)
class Handed:
    """A request at the engine."""

    at_s: float
    place: int
    gateway: int = field(compare=False)
    sent_s: float = field(compare=False)
    known_s: float = field(compare=False)
    """The gateway knows of it since then, and takes what has passed off what it promises."""
    asked: Asked = field(compare=False)


@dataclass(slots=True)
class _Gateway:
    free_s: float = 0.0
    queue: list[tuple[float, int, Asked]] = field(default_factory=list[tuple[float, int, Asked]])

    @property
    def begins_s(self) -> float:
        """When it takes up what waits; something does."""
        return max(self.free_s, self.queue[0][0] + WAY_S)


class Gateways:
    """All of a machine. Connections are theirs by turns, and so are all requests of one."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._all = [_Gateway() for _ in range(GATEWAYS)]
        self._asked = 0

    def ask(self, sent_s: float, asked: Asked, gateway: int | None = None) -> None:
        """A client sends a request, none before those that were sent to the same gateway.

        Args:
            sent_s: when.
            asked: what.
            gateway: of its connection; None: it is a new one.
        """
        self._asked += 1
        one = self._all[self._asked % GATEWAYS if gateway is None else gateway]
        one.queue.append((sent_s, self._asked, asked))

    @property
    def begins_s(self) -> float | None:
        """When the next one takes requests up; None: there are none."""
        return min((one.begins_s for one in self._all if one.queue), default=None)

    def handed(self, until_s: float) -> Iterable[Handed]:
        """Requests that are taken up until then, with when they are at the engine."""
        for gateway, one in enumerate(self._all):
            while one.queue and one.begins_s <= until_s:
                known_s = one.begins_s
                taken = [each for each in one.queue if each[0] + WAY_S <= known_s]
                del one.queue[: len(taken)]
                apart_s = self._dice.uniform(*APART_S)
                together_s = (REQUEST_S - apart_s) * self._dice.uniform(*UNLIKE)
                one.free_s = known_s + together_s * len(taken)
                for sent_s, place, asked in taken:
                    one.free_s += apart_s
                    yield Handed(one.free_s + WAY_S, place, gateway, sent_s, known_s, asked)

    def receive(self, now_s: float) -> None:
        """A step's tokens have left the engine; they are told one by one (``tell``)."""
        for one in self._all:
            one.free_s = max(one.free_s, now_s + WAY_S)

    def tell(self, gateway: int, *, first: bool, last: bool) -> float:
        """When a client has the next token of that step."""
        one = self._all[gateway]
        one.free_s += TOKEN_S + FIRST_S * first + END_S * last
        return one.free_s + WAY_S
