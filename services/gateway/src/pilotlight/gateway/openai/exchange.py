"""One API request and its answer, from the key to the usage row; chat and plain completions differ in their shapes alone."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
from starlette.responses import Response

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.http import Answering, EventStream
from pilotlight.gateway.measures import Measures
from pilotlight.gateway.openai import sse
from pilotlight.gateway.openai.answer import Answer, Delta
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.openai.types import Usage
from pilotlight.gateway.requests import Ended, Held, Requests, TokenRequest, Tokens, Update

log = structlog.get_logger()


class UsageSink(Protocol):
    """Where finished requests are noted (``UsageRecorder``)."""

    def record(self, *, model: str, key_id: str, request_id: str, prompt_tokens: int, output_tokens: int, status: str) -> None:
        """Note one; never waits."""
        ...


class Shapes(ABC):
    """How one kind of completion looks."""

    @abstractmethod
    def opening(self) -> object | None:
        """First event of a stream, before any text; None for no such event."""

    @abstractmethod
    def chunk(self, delta: Delta) -> object:
        """An event with text."""

    @abstractmethod
    def closing(self, finish_reason: str) -> object:
        """The event that says why the answer ended."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> object:
        """The last event, for those who asked for usage."""

    @abstractmethod
    def whole(self, delta: Delta, finish_reason: str, usage: Usage) -> object:
        """The answer in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeParts:
    """What an exchange works with."""

    requests: Requests
    usage: UsageSink
    measures: Measures
    clock: Clock


class Exchange:
    """Runs one request and shapes its answer."""

    def __init__(self, parts: ExchangeParts, request: TokenRequest, answer: Answer, options: Options, key_id: str) -> None:
        self._parts = parts
        self._request = request
        self._answer = answer
        self._options = options
        self._key_id = key_id
        self._was_held = False
        self._first_token_s: float | None = None

    def response(self, shapes: Shapes) -> Response:
        """The answer as it comes, or in one piece."""
        if self._options.stream:
            return EventStream(lambda: self._events(shapes))
        return Answering(lambda: self._whole(shapes))

    async def _events(self, shapes: Shapes) -> AsyncGenerator[bytes, None]:
        opening = shapes.opening()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                if isinstance(delta, Held):
                    yield sse.comment(_progress(delta))
                    continue
                data = b""
                if opening is not None:
                    data, opening = sse.event(opening), None
                if delta.text or delta.tokens:
                    data += sse.event(shapes.chunk(delta))
                if data:
                    yield data
        last = sse.event(shapes.closing(self._answer.finish_reason or "stop"))
        if self._options.include_usage:
            last += sse.event(shapes.usage_chunk(self._answer.usage))
        yield last + sse.DONE

    async def _whole(self, shapes: Shapes) -> Response:
        async with aclosing(self._deltas()) as deltas:
            pieces = [delta async for delta in deltas if isinstance(delta, Delta)]
        delta = Delta("".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens])
        body = shapes.whole(delta, self._answer.finish_reason or "stop", self._answer.usage)
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _deltas(self) -> AsyncGenerator[Held | Delta, None]:
        status = "cancelled"
        try:
            async with aclosing(self._parts.requests.run(self._request)) as updates:
                async for update in updates:
                    yield self._take(update)
                    if self._answer.finish_reason is not None:
                        # A stop string, or the end: leaving here cancels what the engine still does.
                        break
            status = "ok"
        except PilotlightError as error:
            status = error.code
            raise
        except Exception:
            status = "internal"
            raise
        finally:
            self._record(status)

    def _take(self, update: Update) -> Held | Delta:
        match update:
            case Held():
                self._was_held = True
                return update
            case Tokens(tokens):
                if self._first_token_s is None:
                    self._first_token_s = self._parts.clock.monotonic_s() - self._request.arrived_s
                    model = self._request.model
                    self._parts.measures.first_token(model.name, met=self._first_token_s * 1000 <= model.slo.ttft_ms)
                return self._answer.feed(tokens)
            case Ended(finish):
                return self._answer.finish(finish)

    def _record(self, status: str) -> None:
        request, answer = self._request, self._answer
        elapsed_s = self._parts.clock.monotonic_s() - request.arrived_s
        self._parts.usage.record(
            model=request.model.name,
            key_id=self._key_id,
            request_id=request.request_id,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            status=status,
        )
        self._parts.measures.finished(
            request.model.name, status, answer.prompt_tokens, answer.output_tokens, self._first_token_s, held=self._was_held
        )
        log.info(
            "request done",
            action="request_done",
            request_id=request.request_id,
            model=request.model.name,
            status=status,
            held=self._was_held,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            first_token_s=self._first_token_s,
            elapsed_s=elapsed_s,
        )


def _progress(held: Held) -> str:
    fetched = "" if held.fetched is None else f" progress={held.fetched:.2f}"
    return f"pilotlight queue={held.ahead} phase={held.phase}{fetched} elapsed={held.elapsed_s:.1f}s"
