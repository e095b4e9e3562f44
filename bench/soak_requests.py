"""What a soak asks: a mixture of everything that the API takes, and what a right answer to it
is.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

SYSTEM = "You are a helpful assistant who answers briefly and to the point, and who says so when there is something that you do not know."
"""Half of the prompts share it: several blocks of the prefix cache."""
TOPICS = (
    "a pilot light",
    "a fox",
    "the sea",
    "a candle",
    "rain",
    "a stove",
    "the moon",
    "a garden",
    "bread",
    "a river",
)
WAYS = ("What is {}?", "Tell me a short story about {}.")
SCHEMA = {
    "type": "object",
    "properties": {"known": {"type": "boolean"}},
    "required": ["known"],
    "additionalProperties": False,
}
OUTPUT_TOKENS = (1, 4, 8, 16)
KINDS = {"greedy": 60, "sampled": 15, "logprobs": 8, "grammar": 2, "long": 5, "cancelled": 10}
"""Of a hundred requests."""
LONG_WORDS = (200, 600)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    kind: str
    body: dict[str, Any]
    reference: int | None = None
    """The reference's number whose answer, alone, this must be."""

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Told:
    """What came back."""

    status: int
    text: str = ""
    finish: str | None = None
    logprobs: int = 0
    error: str = ""
    cancelled: bool = False
    usage_tokens: int | None = None


def references(model: str) -> list[dict[str, Any]]:
    """Requests whose answers are taken alone, before the flood."""
    found: list[dict[str, Any]] = []
    for number, topic in enumerate(TOPICS):
        for way, sentence in enumerate(WAYS):
            system = [{"role": "system", "content": SYSTEM}] if (number + way) % 2 else []
            messages = [*system, {"role": "user", "content": sentence.format(topic)}]
            found += [_body(model, messages, tokens) for tokens in OUTPUT_TOKENS[1:]]
    return found


def draw(rng: random.Random, model: str, known: Sequence[dict[str, Any]]) -> Ask:
    """The next request."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    stream = (
        {"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}
    )
    words = [rng.choice(TOPICS) for _ in range(rng.randrange(1, 12))]
    messages = [{"role": "user", "content": " and ".join(words)}]
    tokens = rng.choice(OUTPUT_TOKENS)
    match kind:
        case "greedy":
            number = rng.randrange(len(known))
            return Ask(kind, {**known[number], **stream}, number)
        case "sampled":
            some = {
                "temperature": rng.uniform(0.1, 2.0),
                "top_p": rng.uniform(0.1, 1.0),
                "seed": rng.randrange(1000),
            }
            more = {
                "presence_penalty": rng.uniform(-2.0, 2.0),
                "frequency_penalty": rng.uniform(-2.0, 2.0),
            }
            return Ask(
                kind,
                {
                    **_body(model, messages, tokens),
                    **some,
                    **(more if rng.random() < 0.5 else {}),
                    **stream,
                },
            )
        case "logprobs":
            more = {"logprobs": True, "top_logprobs": rng.randrange(6), "temperature": 1.0}
            return Ask(kind, {**_body(model, messages, tokens), **more, **stream})
        case "grammar":
            described = {
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": SCHEMA, "strict": True},
            }
            body = {**_body(model, messages, 64), "response_format": described, **stream}
            del body["ignore_eos"]
            return Ask(kind, body)
        case "long":
            words = [
                rng.choice(("light", "warm", "small", "old"))
                for _ in range(rng.randrange(*LONG_WORDS))
            ]
            return Ask(
                kind,
                {**_body(model, [{"role": "user", "content": " ".join(words)}], tokens), **stream},
            )
        case _:
            return Ask(kind, {**_body(model, messages, 200), "stream": True})


async def ask(http: httpx2.AsyncClient, one: Ask) -> Told:
    """Send it and read the answer; a request of the kind ``cancelled`` is left after its second
    event.
    """
    if not one.stream:
        response = await http.post("/v1/chat/completions", json=one.body)
        if response.status_code != 200:
            return Told(response.status_code, error=response.text)
        document = response.json()
        choice = document["choices"][0]
        return Told(
            200,
            choice["message"]["content"] or "",
            choice["finish_reason"],
            _num_logprobs(choice),
            usage_tokens=document["usage"]["completion_tokens"],
        )
    async with http.stream("POST", "/v1/chat/completions", json=one.body) as response:
        if response.status_code != 200:
            return Told(
                response.status_code, error=(await response.aread()).decode(errors="replace")
            )
        told = Told(200)
        events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            events += 1
            _read(json.loads(line[6:]), told)
            if one.kind == "cancelled" and events == 2:
                told.cancelled = True
                return told
        return told


def fault(one: Ask, told: Told, answers: Sequence[str]) -> str:
    """What is wrong with an answer; empty: nothing."""
    if told.status != 200 or told.error:
        return f"status {told.status}: {told.error}"
    if told.cancelled:
        return ""
    if told.finish not in ("stop", "length"):
        return f"finish reason {told.finish}"
    if one.reference is not None and told.text != answers[one.reference]:
        return f"{told.text!r}, alone {answers[one.reference]!r}"
    if (
        one.kind == "grammar"
        and told.finish == "stop"
        and not isinstance(json.loads(told.text).get("known"), bool)
    ):
        return f"not of the schema: {told.text!r}"
    if one.kind != "cancelled" and told.usage_tokens is None:
        return "no usage"
    if one.kind == "logprobs" and told.logprobs != told.usage_tokens:
        return f"{told.logprobs} log probabilities of {told.usage_tokens} tokens"
    if (
        one.body.get("ignore_eos")
        and one.kind != "cancelled"
        and told.usage_tokens != one.body["max_tokens"]
    ):
        return f"{told.usage_tokens} tokens of {one.body['max_tokens']}"
    return ""


def _body(model: str, messages: Sequence[dict[str, str]], tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


def _read(event: dict[str, Any], told: Told) -> None:
    if error := event.get("error"):
        told.error = json.dumps(error)
    if usage := event.get("usage"):
        told.usage_tokens = usage["completion_tokens"]
    for choice in event.get("choices") or ():
        told.text += choice["delta"].get("content") or ""
        told.finish = choice.get("finish_reason") or told.finish
        told.logprobs += _num_logprobs(choice)


def _num_logprobs(choice: dict[str, Any]) -> int:
    logprobs: dict[str, Any] = choice.get("logprobs") or {}
    content: list[Any] = logprobs.get("content") or []
    return len(content)
