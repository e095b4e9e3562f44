"""One API request and its answer, from the key to the usage row; chat and plain completions differ
in their shapes alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.telemetry import log_request
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.http import Answering, EventStream, Write
from pilotlight.gateway.openai.answer import Answer, Delta, joined
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.openai.usage_sink import UsageSink
from pilotlight.gateway.records.usage_journal import Meter
from pilotlight.gateway.schema.replies import PlacedToken, PromptDetails, Usage
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.merged import merged
from pilotlight.gateway.serving.requests import Requests
from pilotlight.gateway.serving.starts import Starts
from pilotlight.gateway.serving.token_log import PromptRead
from pilotlight.gateway.serving.token_request import Ended, Held, TokenRequest, Tokens, Update


@dataclass(frozen=True, slots=True)
class Whole:
    """A choice in one piece."""

    index: int
    delta: Delta
    finish_reason: str
    placed: list[dict[str, PlacedToken] | None] | None = None
    """``prompt_logprobs``, where they were asked for."""


class Shapes(ABC):
    """How one kind of completion looks."""

    @abstractmethod
    def opening(self, index: int) -> object | None:
        """First event of a choice's stream, before any text; None for no such event."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta) -> object:
        """An event with a choice's text."""

    @abstractmethod
    def closing(self, index: int, finish_reason: str) -> object:
        """The event that says why a choice ended."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> object:
        """The last event, for requests that ask for usage."""

    @abstractmethod
    def whole(self, choices: Sequence[Whole], usage: Usage) -> object:
        """The answer in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeParts:
    """What an exchange works with."""

    requests: Requests
    starts: Starts
    usage: UsageSink
    measures: Measures
    clock: Clock


@dataclass(frozen=True, slots=True)
class Piece:
    """What became of a choice; with the last one, why it ended."""

    index: int
    what: Held | Delta
    finish_reason: str | None


PieceTaker = Callable[[Piece], Awaitable[None]]


class Choice:
    """One of a request's answers: a request of its own to the fleet."""

    __slots__ = (
        "_parts",
        "_taker",
        "answer",
        "around",
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
        self._parts = parts
        self.exchange: Exchange | None = None
        """While it runs."""
        self._taker: PieceTaker | None = None
        """Of what happens to it, while it runs."""

    def run(self, take: PieceTaker) -> Awaitable[None]:
        """Everything that happens to it, to its end."""
        self._taker = take
        return self._parts.requests.run(self.request, self._listen)

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
            case Tokens(tokens, read):
                before = self._read(read)
                if self.first_token_s is None:
                    self.first_token_s = self._parts.clock.monotonic_s() - self.request.arrived_s
                    model = self.request.model
                    self._parts.measures.first_token(
                        model.name, met=self.first_token_s * 1000 <= model.slo.ttft_ms
                    )
                delta = self.answer.feed(tokens)
                return delta if before is None else joined([before, delta])
            case Ended(finish, read):
                before = self._read(read)
                delta = self.answer.finish(finish)
                return delta if before is None else joined([before, delta])

    def _read(self, read: PromptRead | None) -> Delta | None:
        """What the answer says of its prompt, if that is something, and once."""
        if self.answer.told is not None:
            return None
        said = self.answer.read(read)
        return said if said.text or said.tokens else None


class Exchange:
    """Runs one API request, however many choices it has, and shapes its answer.

    One choice's error is that of all.
    """

    __slots__ = ("_choices", "_key_id", "_meter", "_options", "_parts")

    def __init__(
        self, parts: ExchangeParts, choices: Sequence[Choice], options: Options, key_id: str
    ) -> None:
        self._parts = parts
        self._choices = choices
        self._options = options
        self._key_id = key_id
        self._meter: Meter | None = None

    def response(self, shapes: Shapes) -> ASGIApp:
        """The answer as it comes, or in one piece."""
        if self._options.stream:
            events = _Events(self, self._choices, shapes, self._options)
            return EventStream(events.run, within=self, last=events.last)
        return Answering(partial(self.whole, shapes))

    async def whole(self, shapes: Shapes) -> Response:
        """The answer in one piece.

        Raises:
            PilotlightError: there is none.
        """
        deltas: dict[int, list[Delta]] = {choice.index: [] for choice in self._choices}

        async def take(piece: Piece) -> None:
            if isinstance(piece.what, Delta):
                deltas[piece.index].append(piece.what)

        await self.run(take)
        wholes = [
            Whole(
                choice.index,
                joined(deltas[choice.index]),
                choice.answer.finish_reason or "stop",
                choice.answer.told.placed if choice.answer.told is not None else None,
            )
            for choice in self._choices
        ]
        return Response(
            msgspec.json.encode(shapes.whole(wholes, self.usage())), media_type="application/json"
        )

    @property
    def answer(self) -> Answer:
        """The first choice's."""
        return self._choices[0].answer

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token of any choice; None: there is none yet."""
        known = (choice.first_token_s for choice in self._choices)
        return min((each for each in known if each is not None), default=None)

    async def run(self, take: PieceTaker) -> None:
        """Everything that happens to the choices, to their ends; usage is noted.

        Raises:
            PilotlightError: one of them failed.
        """
        with self:
            await self.running(take)

    def running(self, take: PieceTaker) -> Awaitable[None]:
        """As ``run``, within the exchange as a context manager: for those that wait without a
        coroutine for that.
        """
        return merged([choice.run for choice in self._choices], take)

    def __enter__(self) -> None:
        for choice in self._choices:
            choice.exchange = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for choice in self._choices:
            choice.exchange = None
        match error:
            case None:
                self._record("ok")
            case PilotlightError():
                self._record(error.code)
            case Exception():
                self._record("internal")
            case _:
                self._record("cancelled")

    def meter_output(self) -> None:
        """Before output goes to the client: note how much there is."""
        output_tokens = sum([choice.answer.output_tokens for choice in self._choices])
        if self._meter is None:
            request = self._choices[0].request
            self._meter = self._parts.usage.meter(
                model=request.model.name,
                key_id=self._key_id,
                request_id=request.request_id,
                prompt_tokens=self.usage().prompt_tokens,
                streamed=self._options.stream,
            )
        if self._meter is not None:
            self._meter.output(output_tokens)

    def usage(self) -> Usage:
        """What is billed so far: each prompt once."""
        prompts = {
            id(choice.request.siblings): len(choice.request.prompt_ids) for choice in self._choices
        }
        prompt_tokens = sum(prompts.values())
        output_tokens = sum(choice.answer.output_tokens for choice in self._choices)
        # Of several answers to one prompt, what was there for all of them.
        cached: dict[int, int] = {}
        for choice in self._choices:
            prompt = id(choice.request.siblings)
            found = choice.answer.cached_tokens
            cached[prompt] = min(found, cached.get(prompt, found))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(cached.values())),
        )

    def _record(self, status: str) -> None:
        request, usage = self._choices[0].request, self.usage()
        elapsed_s = self._parts.clock.monotonic_s() - request.arrived_s
        first_token_s = self.first_token_s
        held = any(choice.was_held for choice in self._choices)
        self._parts.usage.record(
            model=request.model.name,
            key_id=self._key_id,
            request_id=request.request_id,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            status=status,
            meter=self._meter,
        )
        self._parts.measures.finished(
            request.model.name,
            status,
            usage.prompt_tokens,
            usage.completion_tokens,
            first_token_s,
            held=held,
        )
        log_request(
            "request done",
            "request_done",
            request_id=request.request_id,
            model=request.model.name,
            status=status,
            choices=len(self._choices),
            held=held,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            first_token_s=first_token_s,
            elapsed_s=elapsed_s,
        )


class _Events:
    """An exchange as a stream of events."""

    __slots__ = ("_choices", "_exchange", "_options", "_shapes", "_write")

    def __init__(
        self, exchange: Exchange, choices: Sequence[Choice], shapes: Shapes, options: Options
    ) -> None:
        self._exchange, self._choices = exchange, choices
        self._shapes, self._options = shapes, options

    def run(self, write: Write) -> Awaitable[None]:
        """Write all events but the last. No coroutine of its own: as many requests as wait would
        each keep it.
        """
        self._write = write
        return self._exchange.running(self._take)

    def last(self) -> bytes:
        """The events at the end."""
        if not self._options.include_usage:
            return sse.DONE
        return sse.event(self._shapes.usage_chunk(self._exchange.usage())) + sse.DONE

    async def _take(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.is_held = isinstance(piece.what, Held)
        if isinstance(piece.what, Held):
            if not any(each.is_held for each in self._choices[: piece.index]):
                await self._write(sse.comment(progress_text(piece.what)))
            return
        data = _events_of(choice, piece, piece.what, self._shapes)
        choice.opened = True
        if data:
            await self._write(data)


def _events_of(choice: Choice, piece: Piece, delta: Delta, shapes: Shapes) -> bytes:
    """A choice's events: its first, its text, its last, as far as they come with this piece."""
    data = b""
    if not choice.opened and (opening := shapes.opening(piece.index)) is not None:
        data = sse.event(opening)
    if delta.tokens or delta.calls or delta.reasoning:
        data += sse.event(shapes.chunk(piece.index, delta))
    elif delta.text:
        if choice.around is None:
            choice.around = sse.around(lambda text: shapes.chunk(piece.index, Delta(text)))
        data += sse.filled(choice.around, delta.text)
    if piece.finish_reason is not None:
        data += sse.event(shapes.closing(piece.index, piece.finish_reason))
    return data


def progress_text(held: Held) -> str:
    """What the comment of a stream says of a request that waits."""
    fetched = "" if held.fetched is None else f" progress={held.fetched:.2f}"
    return (
        f"pilotlight queue={held.ahead} phase={held.phase}{fetched} elapsed={held.elapsed_s:.1f}s"
    )
