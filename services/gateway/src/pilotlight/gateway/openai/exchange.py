"""One API request and its answer, from the key to the usage row; chat and plain completions differ
in their shapes alone.
"""

from collections.abc import Awaitable, Sequence
from functools import partial
from types import TracebackType

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from pilotlight.common.errors import PilotlightError
from pilotlight.common.telemetry import log_request
from pilotlight.gateway.edge import sse
from pilotlight.gateway.edge.http import Answering, EventStream
from pilotlight.gateway.limits.limiter import Admission
from pilotlight.gateway.openai.answer import Answer, Delta, joined
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import Choice, ExchangeParts, Piece, PieceTaker
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.openai.shapes import Shapes, Whole
from pilotlight.gateway.records.usage_journal import Meter
from pilotlight.gateway.schema.replies import PromptDetails, Usage
from pilotlight.gateway.serving.merged import merged
from pilotlight.gateway.serving.token_request import Held

GUESSED_OUTPUT_TOKENS = 1024
"""Of an answer whose length the client does not limit: until it has ended, it counts as this long.
"""


class Exchange:
    """Runs one API request, however many choices it has, and shapes its answer.

    One choice's error is that of all.
    """

    __slots__ = (
        "_admission",
        "_asker",
        "_choices",
        "_meter",
        "_options",
        "_parts",
        "_scope",
    )

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
        self._admission: Admission | None = None
        self._meter: Meter | None = None

    def response(self, shapes: Shapes) -> ASGIApp:
        """The answer as it comes, or in one piece."""
        if self._options.stream:
            return _Events(self, self._choices, shapes, self._options)
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
        known = [choice.first_token_s for choice in self._choices]
        return min([each for each in known if each is not None], default=None)

    async def run(self, take: PieceTaker) -> None:
        """Everything that happens to the choices, to their ends; usage is noted.

        Raises:
            PilotlightError: one of them failed, or the key's limits do not let them begin.
        """
        with self:
            await self.running(take)

    def running(self, take: PieceTaker) -> Awaitable[None]:
        """As ``run``, within the exchange as a context manager: for those that wait without a
        coroutine for that, if what their keys have used is known.
        """
        key = self._asker.key
        if key.tenant.limited:
            if not self._parts.limiter.knows(key.key_id, key.tenant):
                return self._once_known(take)
            self._admit()
        return self._merged(take)

    def _merged(self, take: PieceTaker) -> Awaitable[None]:
        return merged([choice.run for choice in self._choices], take)

    async def _once_known(self, take: PieceTaker) -> None:
        await self._parts.limiter.learn(self._asker.key.key_id, self._asker.key.tenant)
        self._admit()
        await self._merged(take)

    def _admit(self) -> None:
        """Within the limits of its key."""
        key = self._asker.key
        self._admission = self._parts.limiter.admit_known(
            key.key_id, key.tenant, self._estimate(), self._scope, paced=self._asker.paced
        )

    def _estimate(self) -> int:
        """Tokens that it may take: its prompts, each once, and as much output as was asked for."""
        tokens = self._prompt_tokens()
        for choice in self._choices:
            most = choice.request.sampling.max_tokens
            tokens += min(most, GUESSED_OUTPUT_TOKENS) if choice.request.shorten else most
        return tokens

    def __enter__(self) -> None:
        if self._options.stream:
            for choice in self._choices:
                choice.exchange = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for choice in self._choices:
            choice.ended()
        match error:
            case None:
                status = "ok"
            case PilotlightError():
                status = error.code
            case Exception():
                status = "internal"
            case _:
                status = "cancelled"
        if self._asker.key.tenant.limited and self._admission is None:
            return  # It was not let in.
        usage = self._record(status)
        if self._admission is not None:
            failed = status not in ("ok", "cancelled") and not usage.completion_tokens
            self._admission.end(0 if failed else usage.total_tokens)

    def meter_output(self) -> None:
        """Before output goes to the client: note how much there is."""
        output_tokens = 0
        for choice in self._choices:
            output_tokens += choice.answer.output_tokens
        if self._meter is None:
            request = self._choices[0].request
            self._meter = self._parts.usage.meter(
                model=request.model.name,
                key_id=self._asker.key.key_id,
                request_id=request.request_id,
                prompt_tokens=self._prompt_tokens(),
            )
        if self._meter is not None:
            self._meter.output(output_tokens, self._device_s)

    @property
    def _device_s(self) -> float:
        return sum([choice.device_s for choice in self._choices])

    def usage(self) -> Usage:
        """What is billed so far: each prompt once."""
        if len(self._choices) == 1:
            only = self._choices[0]
            return _usage(
                len(only.request.prompt_ids), only.answer.output_tokens, only.answer.cached_tokens
            )
        output_tokens = sum(choice.answer.output_tokens for choice in self._choices)
        # Of several answers to one prompt, what was there for all of them.
        cached: dict[int, int] = {}
        for choice in self._choices:
            prompt = id(choice.request.siblings)
            found = choice.answer.cached_tokens
            cached[prompt] = min(found, cached.get(prompt, found))
        return _usage(self._prompt_tokens(), output_tokens, sum(cached.values()))

    def _prompt_tokens(self) -> int:
        """Of its prompts, each once."""
        if len(self._choices) == 1:
            return len(self._choices[0].request.prompt_ids)
        prompts = {
            id(choice.request.siblings): len(choice.request.prompt_ids) for choice in self._choices
        }
        return sum(prompts.values())

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
            device_s=self._device_s,
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
        tokens = usage.completion_tokens - len(self._choices)
        if status == "ok" and first_token_s is not None and tokens > 0:
            # Of several choices, which run side by side, the mean of all.
            token_s = (elapsed_s - first_token_s) * len(self._choices) / tokens
            met = 1000 * token_s <= request.model.slo.tpot_ms
            self._parts.measures.answer(request.model.name, met=met)
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


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=cached_tokens),
    )


class _Events(EventStream):
    """An exchange as a stream of events."""

    __slots__ = ("_choices", "_exchange", "_options", "_shapes")

    def __init__(
        self, exchange: Exchange, choices: Sequence[Choice], shapes: Shapes, options: Options
    ) -> None:
        super().__init__(within=exchange)
        self._exchange, self._choices = exchange, choices
        self._shapes, self._options = shapes, options

    def make(self) -> Awaitable[None]:
        """No coroutine of its own: as many requests as wait would each keep it."""
        return self._exchange.running(self._take)

    def last(self) -> bytes:
        if not self._options.include_usage:
            return sse.DONE
        return sse.event(self._shapes.usage_chunk(self._exchange.usage())) + sse.DONE

    async def _take(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.is_held = isinstance(piece.what, Held)
        if isinstance(piece.what, Held):
            if not any(each.is_held for each in self._choices[: piece.index]):
                await self.write(sse.comment(progress_text(piece.what)))
            return
        data = _events_of(choice, piece, piece.what, self._shapes)
        choice.opened = True
        if data:
            await self.write(data)


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
