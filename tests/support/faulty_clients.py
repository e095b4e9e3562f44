"""Clients of a ``FaultySystem``: what they ask, what they must get, and what they got."""

import asyncio
import json
import random
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from faulty_system import FaultySystem

from pilotlight.common.errors import PilotlightError
from pilotlight.common.ids import new_request_id
from pilotlight.common.waiting import pause
from pilotlight.gateway.auth import KeyInfo
from pilotlight.gateway.edge.bodies import BodyBudget, BodyRoom
from pilotlight.gateway.edge.departure import ClientGone
from pilotlight.gateway.openai.answer import Answer
from pilotlight.gateway.openai.asker import Asker
from pilotlight.gateway.openai.choice import Choice
from pilotlight.gateway.openai.completions import CompletionShapes
from pilotlight.gateway.openai.exchange import Exchange
from pilotlight.gateway.openai.parameters import Options
from pilotlight.gateway.serving.token_log import Token
from pilotlight.gateway.serving.token_request import TokenRequest
from pilotlight.gateway.texts.model_text import ModelText
from pilotlight.policy.ids import ModelName, RequestId
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.sim_tokens import SimTokens

KEY = KeyInfo("key-test", "inference", "test")
MAX_PROMPT_TOKENS = 12
MAX_OUTPUT_TOKENS = 100


class Kind(StrEnum):
    """How a client asks."""

    WHOLE = "whole"
    STREAM = "stream"
    STOP = "stop"
    """Streams, and ends at a stop string."""
    LEAVES = "leaves"
    """Streams, and is gone after some chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An answer as a client sees it."""

    text: str
    finish_reason: str | None
    completion_tokens: int | None
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a schedule."""

    request_id: RequestId
    kind: Kind
    model: ModelName
    at_s: float
    prompt_ids: list[int]
    sampling: Sampling
    stops: tuple[str, ...]
    leaves_after: int
    """Chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one request."""

    ask: Ask
    wrong: str = ""
    """Why the answer is not that of the undisturbed run."""
    error: str = ""
    """Code of a clean error."""
    left: bool = False


def asks_of(
    rng: random.Random,
    models: tuple[str, ...],
    text: ModelText,
    vocab_size: int,
    count: int,
    spread_s: float,
) -> list[Ask]:
    """What the clients of one schedule ask."""
    return [
        _ask(rng, ModelName(rng.choice(models)), text, vocab_size, rng.uniform(0, spread_s))
        for _ in range(count)
    ]


def _ask(
    rng: random.Random, model: ModelName, text: ModelText, vocab_size: int, at_s: float
) -> Ask:
    kind = rng.choice((Kind.WHOLE, Kind.STREAM, Kind.STREAM, Kind.STOP, Kind.LEAVES))
    prompt_ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, MAX_PROMPT_TOKENS))]
    sampling = Sampling(
        seed=rng.getrandbits(63),
        max_tokens=rng.randint(1, MAX_OUTPUT_TOKENS),
        stop_token_ids=tuple(rng.randrange(vocab_size) for _ in range(4)),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.random() < 0.5,
    )
    stops: tuple[str, ...] = ()
    if kind is Kind.STOP:
        whole = undisturbed(text, prompt_ids, sampling, vocab_size, ()).text
        start = rng.randrange(max(1, len(whole) - 3))
        # A piece of what comes, however it is cut into tokens.
        stops = (whole[start : start + rng.randint(1, 3)] or "never",)
    return Ask(
        request_id=new_request_id(),
        kind=kind,
        model=model,
        at_s=at_s,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stops=stops,
        leaves_after=rng.randint(0, 8),
    )


def undisturbed(
    text: ModelText,
    prompt_ids: list[int],
    sampling: Sampling,
    vocab_size: int,
    stops: tuple[str, ...],
) -> Shown:
    """The answer of a run in which nothing is lost."""
    answer = Answer(text, stops, logprobs=sampling.logprobs)
    tokens = SimTokens.after(sampling.seed, prompt_ids, vocab_size)
    shown, logprobs, finish = "", [], FinishReason.LENGTH
    for _ in range(sampling.max_tokens):
        token_id, logprob = tokens.next()
        if not sampling.ignore_eos and token_id in sampling.stop_token_ids:
            finish = FinishReason.STOP
            break
        tokens.take(token_id)
        delta = answer.feed([Token(token_id, logprob)])
        shown += delta.text
        logprobs += [token.logprob for token in delta.tokens]
        if answer.finish_reason is not None:
            break
    shown += answer.finish(finish).text
    return Shown(
        text=shown,
        finish_reason=answer.finish_reason,
        completion_tokens=answer.output_tokens,
        logprobs=tuple(logprobs),
    )


async def run(system: FaultySystem, text: ModelText, ask: Ask) -> Result:
    """Send one request as the HTTP edge does, and compare what comes."""
    await pause(ask.at_s)
    parts = system.exchanges
    request = TokenRequest(
        request_id=ask.request_id,
        model=system.models[ask.model],
        prompt_ids=array("I", ask.prompt_ids),
        sampling=ask.sampling,
        arrived_s=parts.clock.monotonic_s(),
    )
    stream = ask.kind is not Kind.WHOLE
    options = Options(
        stream=stream, include_usage=stream, stops=ask.stops, logprobs=ask.sampling.logprobs
    )
    choice = Choice(0, parts, request, Answer(text, ask.stops, logprobs=ask.sampling.logprobs))
    shapes = CompletionShapes(ask.request_id, ask.model, 0, options)
    asker = Asker(request_id=ask.request_id, key=KEY, arrived_s=request.arrived_s)
    client = _Client(ask.leaves_after if ask.kind is Kind.LEAVES else None)
    scope: dict[str, Any] = {"type": "http", "headers": []}
    BodyRoom(BodyBudget(total_bytes=0, pause_s=0.0)).put_into(scope)
    try:
        await Exchange(parts, [choice], options, asker, scope).response(shapes)(
            scope, client.receive, client.send
        )
    except ClientGone:
        return _judged(system, text, ask, client, left=True)
    except PilotlightError as error:
        return Result(ask=ask, error=error.code)
    return _judged(system, text, ask, client, left=False)


def _judged(
    system: FaultySystem, text: ModelText, ask: Ask, client: "_Client", *, left: bool
) -> Result:
    expected = undisturbed(text, ask.prompt_ids, ask.sampling, system.around.vocab_size, ask.stops)
    got, code = client.shown()
    if code:
        return Result(
            ask=ask,
            error=code,
            wrong="" if expected.text.startswith(got.text) else f"{got} of {expected}",
        )
    prefix = (
        expected.text.startswith(got.text)
        and expected.logprobs[: len(got.logprobs)] == got.logprobs
    )
    good = prefix if left else got == expected
    return Result(ask=ask, left=left, wrong="" if good else f"{got} instead of {expected}")


class _Client:
    """The far end of one connection."""

    def __init__(self, leaves_after: int | None) -> None:
        self._leaves_after = leaves_after
        self._gone = asyncio.Event()
        self._body = b""
        self._events = 0
        if leaves_after == 0:
            self._gone.set()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self._body += message.get("body", b"")
        self._events += message["type"] == "http.response.body"
        if self._leaves_after is not None and self._events >= self._leaves_after:
            self._gone.set()

    def shown(self) -> tuple[Shown, str]:
        """What it saw, and the code of the error event, if one came."""
        chunks, code = [], ""
        if self._body.startswith(b"{"):
            chunks.append(json.loads(self._body))
        else:
            for event in filter(None, self._body.decode().split("\n\n")):
                if event.startswith("event: error"):
                    code = json.loads(event.partition("data: ")[2])["error"]["code"]
                elif event.startswith("data: {"):
                    chunks.append(json.loads(event[6:]))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        logprobs = [
            value
            for choice in choices
            for value in (choice.get("logprobs") or {}).get("token_logprobs", ())
        ]
        reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        shown = Shown(
            text="".join(choice["text"] for choice in choices),
            finish_reason=reasons[-1] if reasons else None,
            completion_tokens=usages[-1]["completion_tokens"] if usages else None,
            logprobs=tuple(logprobs),
        )
        return shown, code
