"""A conversation with one model: what was said, and one answer after the other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.cli.chat_stream import Counted, Finish, Part, Text
from pilotlight.cli.inference import InferenceClient
from pilotlight.common.clock import Clock

Show = Callable[[Part], None]


@dataclass(kw_only=True)
class Answer:
    """One answer, as far as it came."""

    model: str
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    """Empty: it was left before its end."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    """From the request to the first text."""
    took_s: float = 0.0
    cold: bool = False
    """The model was ready nowhere when the request came."""
    request_id: str = ""
    trace_id: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None where there was no second."""
        if self.ttft_s is None or self.output_tokens < 2 or self.took_s <= self.ttft_s:
            return None
        return (self.output_tokens - 1) / (self.took_s - self.ttft_s)

    def take(self, part: Part, elapsed_s: float) -> None:
        """Add a part that came so long after the request."""
        match part:
            case Text(text=text, reasoning=reasoning):
                self.ttft_s = elapsed_s if self.ttft_s is None else self.ttft_s
                if reasoning:
                    self.reasoning += text
                else:
                    self.text += text
            case Finish(reason=reason):
                self.finish_reason = reason
            case Counted(prompt_tokens=prompt, output_tokens=output):
                self.prompt_tokens, self.output_tokens = prompt, output
            case _:
                pass
        self.took_s = elapsed_s

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 4),
            "took_s": round(self.took_s, 4),
            "cold": self.cold,
            "request_id": self.request_id,
            "trace_id": self.trace_id,
        }


@dataclass(kw_only=True)
class Conversation:
    """What was said, and what an answer is asked for with."""

    model: str
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    said: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def ask(self, client: InferenceClient, prompt: str, show: Show, clock: Clock) -> Answer:
        """Say something, and wait for the answer. Ctrl-C leaves it where it is; what came of it
        stays in the conversation. After an error the conversation is what it was before.

        Args:
            client: Asks the gateway.
            prompt: What is said.
            show: Called with each part of the answer as it comes.
            clock: Tells how long that took.
        """
        question = {"role": "user", "content": prompt}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.said, question],
            **self.sampling,
        }
        answer = Answer(model=self.model)
        began_s = clock.monotonic_s()
        try:
            with client.chat(body) as stream:
                answer.cold = stream.headers.get("x-pilotlight-cold-start") == "true"
                answer.request_id = stream.headers.get("x-request-id", "")
                answer.trace_id = stream.headers.get("x-trace-id", "")
                for part in stream.parts:
                    answer.take(part, clock.monotonic_s() - began_s)
                    show(part)
        except KeyboardInterrupt:
            if not answer.text:
                return answer
        self.said += [question, {"role": "assistant", "content": answer.text}]
        return answer
