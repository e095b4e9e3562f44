"""Requests of Ollama's clients that ask nothing: with them a model is loaded, or unloaded."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pilotlight.common.clock import Clock
from pilotlight.common.errors import Forbidden
from pilotlight.gateway.edge.http import Answering
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import Piece
from pilotlight.gateway.openai.names import for_task
from pilotlight.gateway.schema.ollama import (
    AnsweredTurn,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from pilotlight.gateway.schema.requests import CompletionRequest
from pilotlight.gateway.serving.starts import ModelState
from pilotlight.gateway.surfaces.ollama.request import name_of
from pilotlight.policy.pooling import Task

_NO_TIME = re.compile(r"[-+]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
_ASKED = "Hello"
"""What a model is asked so that it starts, for one token."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Answers them.

    A model is loaded by asking it, so that whatever holds for requests holds for this: limits, what
    is said of cold starts, deadlines, usage. No key for inference can unload one: others use it.
    """

    api: OpenAiApi
    clock: Clock

    async def answer(
        self, request: Request, asker: Asker, body: OllamaChatRequest | OllamaGenerateRequest
    ) -> ASGIApp:
        """Answer a request without a prompt or messages.

        Raises:
            ModelNotFound, BadRequest: there is no such model, or none that chats.
            Forbidden: it is to be unloaded, and is loaded.
            CapacityError, TransientError: it cannot be asked now.
        """
        name = name_of(body.model)
        entry = for_task(await self.api.entry(name, asker.key), Task.GENERATE)
        if is_no_time(body.keep_alive):
            if self.api.readiness(entry).state is not ModelState.COLD:
                keep_s = entry.model.scaling.keep_alive_s
                raise Forbidden(
                    f"{entry.model.name} stays loaded, as others may use it:"
                    f" it goes {keep_s:g} s after its last request, or an operator evicts it",
                    param="keep_alive",
                )
            return self._done(entry, body, "unload")
        if self.api.readiness(entry).state is ModelState.READY:
            return self._done(entry, body, "load")
        asked = CompletionRequest(model=name, prompt=_ASKED, temperature=0)
        asked.max_tokens = 1
        begun = await self.api.complete(request.scope, asker, asked)

        async def loaded() -> Response:
            await begun.exchange.run(_drop)
            return self._done(entry, body, "load")

        return Answering(loaded)

    def _done(
        self,
        entry: CatalogEntry,
        body: OllamaChatRequest | OllamaGenerateRequest,
        reason: str,
    ) -> Response:
        """One object, also where a stream was asked for: that is how Ollama answers."""
        answer = OllamaAnswer(
            model=entry.model.name,
            created_at=self.clock.wall().isoformat(),
            done=True,
            done_reason=reason,
        )
        if isinstance(body, OllamaChatRequest):
            answer.message = AnsweredTurn(content="")
        else:
            answer.response = ""
        return Response(msgspec.json.encode(answer), media_type="application/json")


def is_no_time(keep_alive: Any) -> bool:
    """Whether a ``keep_alive`` is none at all: a number of seconds, or a duration as text."""
    if isinstance(keep_alive, str):
        return _NO_TIME.fullmatch(keep_alive) is not None
    return isinstance(keep_alive, int | float) and keep_alive is not False and keep_alive == 0


async def _drop(_: Piece) -> None:
    """What the model says does not matter."""
