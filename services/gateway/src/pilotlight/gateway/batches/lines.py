"""Lines of a batch: from the input file to requests, and from answers to the files of results."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Scope

from pilotlight.common.errors import BadRequest, InternalError, PilotlightError
from pilotlight.common.ids import new_request_id
from pilotlight.common.waiting import Backoff, pause
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.batches.repository import Line
from pilotlight.gateway.edge.errors import error_body
from pilotlight.gateway.openai.api import CHAT_PATH, OpenAiApi
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.chat import ChatShapes
from pilotlight.gateway.openai.completions import CompletionShapes
from pilotlight.gateway.openai.prompt import PromptEncoder
from pilotlight.gateway.openai.shapes import Shapes
from pilotlight.gateway.schema.batches import (
    BatchLine,
    Endpoint,
    FileError,
    FileErrors,
    LineAnswer,
    LineError,
    LineResult,
)
from pilotlight.gateway.schema.pooling import EmbeddingRequest
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest

EMBEDDINGS_PATH = "/v1/embeddings"
Embed = Callable[[Scope, Asker, EmbeddingRequest], Awaitable[bytes]]
"""Makes vectors: the whole answer's body."""
MAX_LINES = 10_000
MAX_TOLD = 20
"""Errors of one file that are told."""
MAX_TRIES = 5
"""Of a line, where another try may help."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0


class FileInvalid(Exception):
    """An input file that no batch can be made of."""

    def __init__(self, errors: FileErrors) -> None:
        super().__init__(errors.data[0].message)
        self.errors = errors


def lines_of(content: bytes, endpoint: Endpoint) -> list[BatchLine]:
    """The lines of an input file; blank ones are passed over.

    Raises:
        FileInvalid: some cannot be read, or there are none, or too many.
    """
    decoder = msgspec.json.Decoder(BatchLine)
    lines: list[BatchLine] = []
    errors: list[FileError] = []
    seen: set[str] = set()
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            errors.append(FileError(code="invalid_line", message=str(error), line=number))
            continue
        if line.url != endpoint:
            message = f"the batch is for {endpoint}, this line for {line.url}"
            errors.append(
                FileError(code="mismatched_url", message=message, line=number, param="url")
            )
        if line.custom_id in seen:
            message = f"custom_id {line.custom_id[:128]!r} is another line's too"
            errors.append(
                FileError(
                    code="duplicate_custom_id", message=message, line=number, param="custom_id"
                )
            )
        seen.add(line.custom_id)
        lines.append(line)
    if not lines and not errors:
        errors.append(FileError(code="empty_file", message="the file has no line"))
    if len(lines) > MAX_LINES:
        message = f"the file has {len(lines)} lines; a batch has at most {MAX_LINES}"
        errors.append(FileError(code="too_many_lines", message=message))
    if errors:
        raise FileInvalid(FileErrors(data=errors[:MAX_TOLD]))
    return lines


@dataclass(frozen=True, slots=True)
class LineRunner:
    """Runs lines as requests of the key that owns their batch."""

    api: OpenAiApi
    keys: Authenticator
    """Say what the owner may do now: its key may have ended, or lost a model, since then."""
    encoder: PromptEncoder
    rng: random.Random
    embed: Embed

    async def run(self, key_id: str, number: int, line: BatchLine) -> Line:
        """What a line is answered; an error that another try may mend is tried again.

        Args:
            key_id: whose line it is.
            number: its place in the file.
            line: what it asks.
        """
        backoff = Backoff(first_s=FIRST_RETRY_S, limit_s=LONGEST_RETRY_S)
        tried = 0
        while True:
            request_id = new_request_id()
            try:
                body = await self._answer(key_id, request_id, line)
                status = 200
            except PilotlightError as error:
                tried += 1
                if error.retryable and tried < MAX_TRIES:
                    await pause(max(error.retry_after_s or 0, backoff.delay_s(tried, self.rng)))
                    continue
                body, status = error_body(error), error.status
            answer = LineAnswer(status_code=status, request_id=request_id, body=msgspec.Raw(body))
            result = LineResult(id=f"batch_{request_id}", custom_id=line.custom_id, response=answer)
            encoded = msgspec.json.encode(result)
            return Line(number=number, succeeded=status == 200, body=encoded)

    async def _answer(self, key_id: str, request_id: Any, line: BatchLine) -> bytes:
        api, raw = self.api, bytes(line.body)
        key = (await self.keys.of_key(key_id, "inference")).for_route(line.url)
        asker = Asker(request_id=request_id, key=key, arrived_s=api.now_s(), paced=False)
        scope: dict[str, Any] = {"type": "http", "state": {}}
        if line.url == EMBEDDINGS_PATH:
            asked = await self.encoder.read(raw, EmbeddingRequest, key_id)
            return await self.embed(scope, asker, asked)
        if line.url == CHAT_PATH:
            chat = await self.encoder.read(raw, ChatRequest, key_id)
            _refuse_stream(chat)
            conversed = await api.converse(scope, asker, chat)
            shapes: Shapes = ChatShapes(
                request_id,
                conversed.entry.model.name,
                api.now_unix_s(),
                conversed.options,
                conversed.tools,
            )
        else:
            plain = await self.encoder.read(raw, CompletionRequest, key_id)
            _refuse_stream(plain)
            conversed = await api.complete(scope, asker, plain)
            shapes = CompletionShapes(
                request_id, conversed.entry.model.name, api.now_unix_s(), conversed.options
            )
        return bytes((await conversed.exchange.whole(shapes)).body)


def unsent(number: int, line: BatchLine, code: str, message: str) -> Line:
    """A line that was never sent.

    Args:
        number: its place in the file.
        line: what it asked.
        code: why.
        message: the same in words.
    """
    result = LineResult(
        id=f"batch_{new_request_id()}",
        custom_id=line.custom_id,
        response=None,
        error=LineError(code=code, message=message),
    )
    return Line(number=number, succeeded=False, body=msgspec.json.encode(result))


async def read_lines(content: bytes, endpoint: Endpoint) -> list[BatchLine]:
    """As ``lines_of``, without holding streams up."""
    return await asyncio.to_thread(lines_of, content, endpoint)


def file_of_lines(lines: Sequence[Line]) -> bytes:
    """A file of results."""
    return b"".join(line.body + b"\n" for line in lines)


def _refuse_stream(request: ChatRequest | CompletionRequest) -> None:
    if request.stream:
        raise BadRequest("lines of a batch are not streamed: leave stream out", param="stream")


def failed_line(number: int, line: BatchLine) -> Line:
    """A line that a bug of this gateway kept from its answer."""
    error = InternalError("the gateway failed on this line; its log says how")
    answer = LineAnswer(
        status_code=error.status,
        request_id=new_request_id(),
        body=msgspec.Raw(error_body(error)),
    )
    result = LineResult(id=f"batch_{answer.request_id}", custom_id=line.custom_id, response=answer)
    return Line(number=number, succeeded=False, body=msgspec.json.encode(result))
