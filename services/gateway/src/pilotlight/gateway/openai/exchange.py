"""One API request and its answer, from the key to the usage row; chat and plain completions differ
in their shapes alone.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
from starlette.responses import Response

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.http import Answering, EventStream
from pilotlight.gateway.openai.answer import Answer, Delta, joined
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.schema.replies import Usage
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.merged import merged
from pilotlight.gateway.serving.requests import Requests
from pilotlight.gateway.serving.token_request import Ended, Held, TokenRequest, Tokens, Update

log = structlog.get_logger()


class UsageSink(Protocol):
    """Where finished requests are noted (``UsageRecorder``)."""

    def record(
        self,
        *,
        model: str,
        key_id: str,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        status: str,
    ) -> None:
        """Note one; never waits.

        Args:
            model: its name.
            key_id: of the API key that pays.
            request_id: the client's request.
            prompt_tokens: counted once, also for several choices.
            output_tokens: of all choices.
            status: ``ok``, ``cancelled`` or an error's code.
        """
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A choice in one piece."""

    index: int
    delta: Delta
    finish_reason: str


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
    usage: UsageSink
    measures: Measures
    clock: Clock


@dataclass(frozen=True, slots=True)
class Piece:
    """What became of a choice; with the last one, why it ended."""

    index: int
    what: Held | Delta
    finish_reason: str | None


class Choice:
    """One of a request's answers: a request of its own to the fleet."""

    def __init__(
        self, index: int, parts: ExchangeParts, request: TokenRequest, answer: Answer
    ) -> None:
        self.index = index
        self.request = request
        self.answer = answer
        self.was_held = False
        self.first_token_s: float | None = None
        """From arrival."""
        self._parts = parts

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Everything that happens to it, to its end."""
        async with aclosing(self._parts.requests.run(self.request)) as updates:
            async for update in updates:
                what = self._take(update)
                yield Piece(self.index, what, self.answer.finish_reason)
                if self.answer.finish_reason is not None:
                    # A stop string, or the end: leaving here cancels what the engine still does.
                    break

    def _take(self, update: Update) -> Held | Delta:
        match update:
            case Held():
                self.was_held = True
                return update
            case Tokens(tokens):
                if self.first_token_s is None:
                    self.first_token_s = self._parts.clock.monotonic_s() - self.request.arrived_s
                    model = self.request.model
                    self._parts.measures.first_token(
                        model.name, met=self.first_token_s * 1000 <= model.slo.ttft_ms
                    )
                return self.answer.feed(tokens)
            case Ended(finish):
                return self.answer.finish(finish)


class Exchange:
    """Runs one API request, however many choices it has, and shapes its answer.

    One choice's error is that of all.
    """

    def __init__(
        self, parts: ExchangeParts, choices: Sequence[Choice], options: Options, key_id: str
    ) -> None:
        self._parts = parts
        self._choices = choices
        self._options = options
        self._key_id = key_id

    def response(self, shapes: Shapes) -> Response:
        """The answer as it comes, or in one piece."""
        if self._options.stream:
            return EventStream(lambda: self._events(shapes))
        return Answering(lambda: self._whole(shapes))

    async def _events(self, shapes: Shapes) -> AsyncGenerator[bytes, None]:
        unopened = {choice.index for choice in self._choices}
        held: set[int] = set()
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece.what, Held):
                    held.add(piece.index)
                    if piece.index == min(held):
                        yield sse.comment(_progress(piece.what))
                    continue
                held.discard(piece.index)
                data = b"".join(
                    _events_of(piece, piece.what, shapes, opens=piece.index in unopened)
                )
                unopened.discard(piece.index)
                if data:
                    yield data
        last = sse.event(shapes.usage_chunk(self._usage())) if self._options.include_usage else b""
        yield last + sse.DONE

    async def _whole(self, shapes: Shapes) -> Response:
        deltas: dict[int, list[Delta]] = {choice.index: [] for choice in self._choices}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece.what, Delta):
                    deltas[piece.index].append(piece.what)
        wholes = [
            Whole(choice.index, joined(deltas[choice.index]), choice.answer.finish_reason or "stop")
            for choice in self._choices
        ]
        return Response(
            msgspec.json.encode(shapes.whole(wholes, self._usage())), media_type="application/json"
        )

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        status = "cancelled"
        try:
            async with aclosing(merged([choice.pieces() for choice in self._choices])) as pieces:
                async for piece in pieces:
                    yield piece
            status = "ok"
        except PilotlightError as error:
            status = error.code
            raise
        except Exception:
            status = "internal"
            raise
        finally:
            self._record(status)

    def _usage(self) -> Usage:
        """What is billed so far: each prompt once."""
        prompts = {
            id(choice.request.siblings): len(choice.request.prompt_ids) for choice in self._choices
        }
        prompt_tokens = sum(prompts.values())
        output_tokens = sum(choice.answer.output_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
        )

    def _record(self, status: str) -> None:
        request, usage = self._choices[0].request, self._usage()
        elapsed_s = self._parts.clock.monotonic_s() - request.arrived_s
        first_token_s = min(
            (choice.first_token_s for choice in self._choices if choice.first_token_s is not None),
            default=None,
        )
        held = any(choice.was_held for choice in self._choices)
        self._parts.usage.record(
            model=request.model.name,
            key_id=self._key_id,
            request_id=request.request_id,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            status=status,
        )
        self._parts.measures.finished(
            request.model.name,
            status,
            usage.prompt_tokens,
            usage.completion_tokens,
            first_token_s,
            held=held,
        )
        log.info(
            "request done",
            action="request_done",
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


def _events_of(piece: Piece, delta: Delta, shapes: Shapes, *, opens: bool) -> list[bytes]:
    """A choice's events: its first, its text, its last, as far as they come with this piece."""
    bodies: list[object] = []
    if opens and (opening := shapes.opening(piece.index)) is not None:
        bodies.append(opening)
    if delta.text or delta.tokens or delta.calls:
        bodies.append(shapes.chunk(piece.index, delta))
    if piece.finish_reason is not None:
        bodies.append(shapes.closing(piece.index, piece.finish_reason))
    return [sse.event(body) for body in bodies]


def _progress(held: Held) -> str:
    fetched = "" if held.fetched is None else f" progress={held.fetched:.2f}"
    return (
        f"pilotlight queue={held.ahead} phase={held.phase}{fetched} elapsed={held.elapsed_s:.1f}s"
    )
