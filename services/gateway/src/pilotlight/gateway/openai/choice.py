"""One of a request's answers, as it comes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pilotlight.common.clock import Clock
from pilotlight.gateway.limits.limiter import Limiter
from pilotlight.gateway.openai.answer import Answer, Delta, joined
from pilotlight.gateway.openai.usage_sink import UsageSink
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.requests import Requests
from pilotlight.gateway.serving.starts import Starts
from pilotlight.gateway.serving.token_log import PromptRead
from pilotlight.gateway.serving.token_request import Held, TokenRequest, Tokens, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeParts:
    """What an exchange works with."""

    requests: Requests
    starts: Starts
    usage: UsageSink
    limiter: Limiter
    measures: Measures
    clock: Clock


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What became of a choice; with the last one, why it ended."""

    index: int
    what: Held | Delta
    finish_reason: str | None


PieceTaker = Callable[[Piece], Awaitable[None]]


class Metered(Protocol):
    """What notes how much of an answer there is (``Exchange``)."""

    def meter_output(self) -> None:
        """Before output goes to the client: note how much there is."""
        ...


class Choice:
    """One of a request's answers: a request of its own to the fleet."""

    __slots__ = (
        "_parts",
        "_taker",
        "answer",
        "around",
        "device_s",
        "exchange",
        "first_token_s",
        "index",
        "is_held",
        "opened",
        "request",
        "was_held",
    )

    def __init__(
        self, index: int, parts: ExchangeParts, request: TokenRequest, answer: Answer
    ) -> None:
        self.index = index
        self.request = request
        self.answer = answer
        self.was_held = False
        self.is_held = self.opened = False
        """Of its stream: the last that was told is that it waits; its first event was sent."""
        self.around: tuple[bytes, bytes] | None = None
        """What is sent before and after each text of its stream; None before the first."""
        self.first_token_s: float | None = None
        """From arrival."""
        self.device_s = 0.0
        """Device-seconds that it had, up to its last token."""
        self._parts = parts
        self.exchange: Metered | None = None
        """While it runs, if its client gets it as it comes."""
        self._taker: PieceTaker | None = None
        """Of what happens to it, while it runs."""

    def run(self, take: PieceTaker) -> Awaitable[None]:
        """Everything that happens to it, to its end."""
        self._taker = take
        return self._parts.requests.run(self.request, self._listen)

    def ended(self) -> None:
        """It does not run any more. It knows its taker no longer, which knows it: until Python
        looks for cycles, thousands of requests would stay that have long been answered.
        """
        self.exchange = self._taker = None

    async def _listen(self, update: Update) -> bool:
        assert self._taker is not None, "it runs"
        what = self._take(update)
        if self.exchange is not None and isinstance(what, Delta):
            self.exchange.meter_output()
        await self._taker(Piece(self.index, what, self.answer.finish_reason))
        # A stop string, or the end: no more is wanted, and what the engine still does is cancelled.
        return self.answer.finish_reason is not None

    def _take(self, update: Update) -> Held | Delta:
        match update:
            case Held():
                self.was_held = True
                return update
            case Tokens(tokens, read, device_s, finish):
                self.device_s = device_s
                deltas = self._read(read)
                if tokens:
                    if self.first_token_s is None:
                        self._first_token()
                    deltas.append(self.answer.feed(tokens))
                if finish is not None:
                    deltas.append(self.answer.finish(finish))
                return joined(deltas)

    def _first_token(self) -> None:
        self.first_token_s = self._parts.clock.monotonic_s() - self.request.arrived_s
        model = self.request.model
        met = self.first_token_s * 1000 <= model.slo.ttft_ms
        self._parts.measures.first_token(model.name, met=met)

    def _read(self, read: PromptRead | None) -> list[Delta]:
        """What the answer says of its prompt, if that is something, and once."""
        if self.answer.told is not None:
            return []
        return [self.answer.read(read)]
