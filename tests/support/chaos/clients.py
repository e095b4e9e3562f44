"""Clients whose requests a fault interrupts: each notes everything that it was told."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

READ_DEADLINE_S = 60.0
"""Between two pieces of an answer: a client that hears nothing for so long was forgotten."""
OUTPUT_TOKENS = 80


@dataclass(frozen=True)
class Ask:
    """One kind of request."""

    name: str
    prompt: str
    stream: bool
    temperature: float = 0.0
    seed: int | None = None

    @property
    def reference(self) -> tuple[str, float, int | None]:
        """What decides its tokens."""
        return self.prompt, self.temperature, self.seed

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": self.temperature,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "logprobs": True,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


GREEDY, STORY = "What is a pilot light?", "Tell me a short story about a fox."
ASKS = (
    Ask("greedy, streamed", GREEDY, stream=True),
    Ask("sampled, streamed", STORY, stream=True, temperature=1.0, seed=7),
    Ask("greedy, whole", GREEDY, stream=False),
    Ask("sampled, whole", STORY, stream=False, temperature=1.0, seed=7),
)


@dataclass
class Answer:
    """What a client got."""

    text: str = ""
    tokens: list[str] = field(default_factory=list[str])
    finish_reason: str | None = None
    usage_tokens: int | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    """What the server said went wrong."""
    broken: str = ""
    """How the connection ended, when it did not end well."""
    request_id: str = ""
    comments: list[str] = field(default_factory=list[str])
    first_token_s: float | None = None
    """From the request on."""
    pause_s: float | None = None
    """The longest between two pieces of text."""

    @property
    def complete(self) -> bool:
        return self.done and self.error is None and not self.broken

    def same_as(self, other: "Answer") -> bool:
        """The same tokens, text and end."""
        return (self.text, self.tokens, self.finish_reason, self.usage_tokens) == (
            other.text,
            other.tokens,
            other.finish_reason,
            other.usage_tokens,
        )

    def begins(self, other: "Answer") -> bool:
        """What has come is how ``other`` begins: nothing wrong, repeated or left out."""
        return other.text.startswith(self.text) and other.tokens[: len(self.tokens)] == self.tokens

    def __str__(self) -> str:
        end = self.broken or self.error or self.finish_reason
        return f"{self.request_id or 'no id'}: {len(self.tokens)} tokens, usage {self.usage_tokens}, {end}: {self.text!r}"


class Running:
    """A request that is under way."""

    def __init__(self, ask: Ask, model: str, url: str, key: str) -> None:
        self.ask = ask
        self.model = model
        self.answer = Answer()
        self.changed = asyncio.Event()
        self._url = url
        self._key = key
        self._heard_s = asyncio.get_running_loop().time()
        self.task = asyncio.create_task(self._run(), name=f"{ask.name} from {model}")

    async def when(self, condition: Callable[[Answer], bool]) -> None:
        """Return when something holds of the answer so far, or it has ended."""
        while not condition(self.answer) and not self.task.done():
            self.changed.clear()
            if condition(self.answer) or self.task.done():
                return
            await self.changed.wait()

    async def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            async with httpx2.AsyncClient(
                base_url=self._url, headers=headers, timeout=READ_DEADLINE_S
            ) as http:
                if self.ask.stream:
                    await self._stream(http)
                else:
                    await self._whole(http)
        except httpx2.HTTPError as error:
            self.answer.broken = f"{type(error).__name__}: {error}"
        finally:
            self.changed.set()

    async def _whole(self, http: httpx2.AsyncClient) -> None:
        response = await http.post("/v1/chat/completions", json=self.ask.body(self.model))
        self.answer.request_id = response.headers.get("x-request-id", "")
        body = response.json()
        if response.status_code != 200:
            self.answer.error = body["error"]
            return
        choice = body["choices"][0]
        self.answer.text = choice["message"]["content"]
        self.answer.tokens = [one["token"] for one in choice["logprobs"]["content"]]
        self.answer.finish_reason = choice["finish_reason"]
        self.answer.usage_tokens = body["usage"]["completion_tokens"]
        self.answer.done = True

    async def _stream(self, http: httpx2.AsyncClient) -> None:
        async with http.stream(
            "POST", "/v1/chat/completions", json=self.ask.body(self.model)
        ) as response:
            self.answer.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                await response.aread()
                self.answer.error = response.json()["error"]
                return
            async for line in response.aiter_lines():
                self._take(line)
                self.changed.set()

    def _take(self, line: str) -> None:
        if line.startswith(":"):
            self.answer.comments.append(line[1:].strip())
        elif line == "data: [DONE]":
            self.answer.done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.answer.error = event["error"]
                return
            if event.get("usage"):
                self.answer.usage_tokens = event["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in event["choices"]):
                self._time_passed()
            for choice in event["choices"]:
                self.answer.text += choice["delta"].get("content") or ""
                self.answer.tokens += [
                    one["token"] for one in (choice.get("logprobs") or {}).get("content", [])
                ]
                self.answer.finish_reason = choice["finish_reason"] or self.answer.finish_reason

    def _time_passed(self) -> None:
        now_s = asyncio.get_running_loop().time()
        gap_s, self._heard_s = now_s - self._heard_s, now_s
        if self.answer.first_token_s is None:
            self.answer.first_token_s = gap_s
        else:
            self.answer.pause_s = max(self.answer.pause_s or 0.0, gap_s)


async def ended(requests: list[Running], deadline_s: float) -> list[Running]:
    """Wait for the end of all; returns those that have not come to one."""
    if requests:
        await asyncio.wait([one.task for one in requests], timeout=deadline_s)
    late = [one for one in requests if not one.task.done()]
    for one in late:
        one.task.cancel()
    return late


async def until(
    condition: Callable[[], Awaitable[str | None]],
    deadline_s: float,
    what: str,
    passed_s: Callable[[], float] | None = None,
) -> float:
    """Wait until a condition has nothing to complain of; the seconds that it took, as ``passed_s``
    counts them.

    Raises:
        AssertionError: it still complains at the deadline; with its last complaint.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    passed_s = passed_s or (lambda: loop.time() - start_s)
    while True:
        complaint = await condition()
        took_s = passed_s()
        if complaint is None and took_s <= deadline_s:
            return took_s
        if took_s > deadline_s:
            raise AssertionError(f"{what}: after {took_s:.1f} s {complaint or 'at last'}")
        await asyncio.sleep(0.03)
