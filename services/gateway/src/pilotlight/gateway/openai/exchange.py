"""One API request and its answer, from the key to the usage row; chat and plain completions differ
in their shapes alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.telemetry import log_request
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.http import Answering, EventStream, Write
from pilotlight.gateway.limits.limiter import Limiter
from pilotlight.gateway.openai.answer import Answer, Delta, joined
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.schema.replies import PlacedToken, PromptDetails, Usage
from pilotlight.gateway.serving.measures import Measures
from pilotlight.gateway.serving.merged import merged
from pilotlight.gateway.serving.requests import Requests
from pilotlight.gateway.serving.starts import Starts
from pilotlight.gateway.serving.token_log import PromptRead
from pilotlight.gateway.serving.token_request import Ended, Held, TokenRequest, Tokens, Update

GUESSED_OUTPUT_TOKENS = 1024
"""Of an answer whose length the client does not limit: until it has ended, it counts as this long.
"""


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
    limiter: Limiter
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
        self._taker: PieceTaker | None = None
        """Of what happens to it, while it runs."""

    def run(self, take: PieceTaker) -> Awaitable[None]:
        """Everything that happens to it, to its end."""
        self._taker = take
        return self._parts.requests.run(self.request, self._listen)

    async def _listen(self, update: Update) -> bool:
        assert self._taker is not None, "it runs"
        await self._taker(Piece(self.index, self._take(update), self.answer.finish_reason))
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

    def __init__(
        self,
        parts: ExchangeParts,
        choices: Sequence[Choice],
        options: Options,
        asker: Asker,
        scope: Scope,
    ) -> None:
        """Run nothing yet.

        Args:
            parts: what it works with.
            choices: the answers that are wanted.
            options: what the answer has.
            asker: whose request it is.
            scope: of the request, whose answer has not begun.
        """
        self._parts = parts
        self._choices = choices
        self._options = options
        self._asker = asker
        self._scope = scope

    def response(self, shapes: Shapes) -> ASGIApp:
        """The answer as it comes, or in one piece."""
        if self._options.stream:
            return EventStream(partial(self._events, shapes))
        return Answering(partial(self.whole, shapes))

    async def _events(self, shapes: Shapes, write: Write) -> None:
        await self.run(partial(self._event, shapes, write))
        last = sse.event(shapes.usage_chunk(self.usage())) if self._options.include_usage else b""
        await write(last + sse.DONE)

    async def _event(self, shapes: Shapes, write: Write, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.is_held = isinstance(piece.what, Held)
        if isinstance(piece.what, Held):
            if not any(each.is_held for each in self._choices[: piece.index]):
                await write(sse.comment(progress_text(piece.what)))
            return
        data = _events_of(choice, piece, piece.what, shapes)
        choice.opened = True
        if data:
            await write(data)

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
            PilotlightError: one of them failed, or the key's limits do not let them begin.
        """
        key = self._asker.key
        admission = await self._parts.limiter.admit(
            key.key_id, key.tenant, self._estimate(), self._scope, paced=self._asker.paced
        )
        status = "cancelled"
        try:
            await merged([choice.run for choice in self._choices], take)
            status = "ok"
        except PilotlightError as error:
            status = error.code
            raise
        except Exception:
            status = "internal"
            raise
        finally:
            usage = self._record(status)
            failed = status not in ("ok", "cancelled") and not usage.completion_tokens
            admission.end(0 if failed else usage.total_tokens)

    def _estimate(self) -> int:
        """Tokens that it may take: its prompts, each once, and as much output as was asked for."""
        output = sum(
            min(request.sampling.max_tokens, GUESSED_OUTPUT_TOKENS)
            if request.shorten
            else request.sampling.max_tokens
            for request in (choice.request for choice in self._choices)
        )
        return self.usage().prompt_tokens + output

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

    def _record(self, status: str) -> Usage:
        request, usage = self._choices[0].request, self.usage()
        elapsed_s = self._parts.clock.monotonic_s() - request.arrived_s
        first_token_s = self.first_token_s
        held = any(choice.was_held for choice in self._choices)
        self._parts.usage.record(
            model=request.model.name,
            key_id=self._asker.key.key_id,
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
        return usage


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
