"""An answer as lines of JSON, as Ollama's clients read them."""

from typing import Literal

import msgspec
from msgspec import UNSET

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.edge.errors import named_message
from pilotlight.gateway.openai.api import Conversed
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.schema.ollama import (
    AnsweredTurn,
    OllamaAnswer,
    OllamaCall,
    OllamaError,
    OllamaFunction,
)
from pilotlight.gateway.serving.token_request import Held
from pilotlight.gateway.surfaces.blocks import Block, Change
from pilotlight.gateway.surfaces.narrated import Narrator, arguments_of

LINES = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache"))
_NS = 1_000_000_000


def error_body(error: PilotlightError, _: str = "") -> bytes:
    """The body that tells a client what went wrong and what to do."""
    message = f"{error.code}: {named_message(error).rstrip('.')}. {error.action}"
    return msgspec.json.encode(OllamaError(error=message))


class OllamaNarrator(Narrator):
    """Tells one answer, to a conversation or to a prompt."""

    headers = LINES

    def __init__(
        self,
        conversed: Conversed,
        asker: Asker,
        clock: Clock,
        *,
        shape: Literal["chat", "generate"],
    ) -> None:
        """Begin.

        Args:
            conversed: what is answered.
            asker: says when the request came; ids of calls follow from its id.
            clock: for durations and dates.
            shape: of which of the two routes.
        """
        super().__init__()
        self._conversed = conversed
        self._asker = asker
        self._clock = clock
        self._shape = shape

    def opening(self) -> bytes:
        return b""

    def waiting(self, held: Held) -> bytes:
        """Nothing: each line is a part of the answer."""
        return b""

    def change(self, change: Change) -> bytes:
        block = change.block
        if block.kind == "call":
            return _line(self._answer(calls=[block])) if change.what == "closed" else b""
        if change.what != "added":
            return b""
        if block.kind == "reasoning":
            return _line(self._answer(thinking=change.text))
        return _line(self._answer(text=change.text))

    def failed(self, error: PilotlightError) -> bytes:
        return error_body(error) + b"\n"

    async def closing(self, finish_reason: str) -> bytes:
        return _line(self._done(self._answer(), finish_reason))

    async def whole(self, finish_reason: str) -> OllamaAnswer:
        blocks = self.blocks.all
        answer = self._answer(
            text="".join(block.text for block in blocks if block.kind == "text"),
            thinking="".join(block.text for block in blocks if block.kind == "reasoning"),
            calls=[block for block in blocks if block.kind == "call"],
        )
        return self._done(answer, finish_reason)

    def _answer(
        self, *, text: str = "", thinking: str = "", calls: list[Block] | None = None
    ) -> OllamaAnswer:
        answer = OllamaAnswer(
            model=self._conversed.entry.model.name,
            created_at=self._clock.wall().isoformat(),
            done=False,
        )
        if self._shape == "generate":
            answer.response = text
            answer.thinking = thinking or UNSET
            return answer
        answer.message = AnsweredTurn(
            content=text,
            thinking=thinking or UNSET,
            tool_calls=[self._call(block) for block in calls] if calls else UNSET,
        )
        return answer

    def _call(self, block: Block) -> OllamaCall:
        return OllamaCall(
            id=self._conversed.tools.call_id(self._asker.request_id, 0, block.call),
            function=OllamaFunction(name=block.name, arguments=arguments_of(block.text)),
        )

    def _done(self, answer: OllamaAnswer, finish_reason: str) -> OllamaAnswer:
        usage = self._conversed.exchange.usage()
        total_s = self._clock.monotonic_s() - self._asker.arrived_s
        first_s = self._conversed.exchange.first_token_s
        prompt_s = total_s if first_s is None else first_s
        answer.done = True
        answer.done_reason = "length" if finish_reason == "length" else "stop"
        answer.prompt_eval_count = usage.prompt_tokens
        answer.eval_count = usage.completion_tokens
        answer.total_duration = int(total_s * _NS)
        answer.load_duration = 0
        answer.prompt_eval_duration = int(prompt_s * _NS)
        answer.eval_duration = int((total_s - prompt_s) * _NS)
        return answer


def _line(answer: OllamaAnswer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
