"""An instance's engine as a fluid: continuous batching without single steps.

::

    a step of n requests                      decode_s(n)                       one token for each of them
    with a prompt beside it                   decode_s(n) + c / prefill rate    and c tokens of the prompt

Prompts are computed one after the other. All that decode get tokens at the same pace, so one clock
counts tokens for all of them, and each ends when that clock has advanced by its own number. Between
two changes nothing has to be looked at: an event for each request that comes, has its first token,
ends.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotlight.policy.cost import EngineSpeed, step_s
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cluster.events import Events


@dataclass(slots=True, eq=False)
class Request:
    """One request, and what came of it."""

    model: ModelName
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: float = math.inf
    finished_s: float = math.inf
    left_tokens: int = 0
    """Still to come; less than the output where it went on elsewhere."""

    def __post_init__(self) -> None:
        self.left_tokens = self.output_tokens

    @property
    def ttft_s(self) -> float:
        """Infinite when it never had a token."""
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """0 when it has one token alone."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an engine takes for its work."""

    speed: EngineSpeed
    """With one request."""
    decode_more_s: float
    """For each further request of a batch."""
    factor: float = 1.0
    """Of a group whose workers have a share of their devices (ParaServe, equation 2)."""
    hops_s: float = 0.0
    """Of a group, for each step."""
    chunk_tokens: int = 512

    def step_s(self, requests: int, prompt_tokens: int = 0) -> float:
        """A step of a batch, with tokens of a prompt beside it."""
        more_s = self.decode_more_s * max(0, requests - 1)
        return self.factor * (step_s(self.speed, prompt_tokens) + more_s) + self.hops_s


@dataclass(slots=True)
class Engine:
    """What one instance runs."""

    events: Events
    pace: Pace
    first: Callable[[Request], None]
    """Called with each first token."""
    ended: Callable[[Request], None]
    """Called with each request's end."""
    _prompts: deque[Request] = field(default_factory=deque["Request"])
    """The first of them is computed."""
    _prompt_left: float = 0.0
    _running: list[tuple[float, int, Request]] = field(
        default_factory=list["tuple[float, int, Request]"]
    )
    """By the count at which each ends."""
    _tokens: float = 0.0
    """Each running request's, since the beginning."""
    _as_of_s: float = 0.0
    _step_s: float = 0.0
    _chunk: float = 0.0
    _version: int = 0
    _number: int = 0

    @property
    def in_flight(self) -> int:
        """Requests that it has."""
        return len(self._prompts) + len(self._running)

    def submit(self, request: Request) -> None:
        """Take a request."""
        self._advance()
        self._prompts.append(request)
        if len(self._prompts) == 1:
            self._prompt_left = float(request.prompt_tokens)
        self._plan()

    def change(self, pace: Pace) -> None:
        """Go on at another pace."""
        self._advance()
        self.pace = pace
        self._plan()

    def stop(self) -> list[Request]:
        """Give up what it has: requests that go on elsewhere, with the tokens that they have."""
        self._advance()
        self._version += 1
        self._step_s = 0.0
        for end, _, request in self._running:
            left_tokens = max(1, math.ceil(end - self._tokens))
            request.prompt_tokens += request.left_tokens - left_tokens
            request.left_tokens = left_tokens
        left = [*self._prompts, *(one for _, _, one in self._running)]
        self._prompts.clear()
        self._running.clear()
        return left

    def _advance(self) -> None:
        now_s = self.events.now_s
        if self._step_s > 0:
            steps = (now_s - self._as_of_s) / self._step_s
            self._tokens += steps
            self._prompt_left -= steps * self._chunk
        self._as_of_s = now_s

    def _plan(self) -> None:
        """Find what happens next."""
        self._version += 1
        if not self._prompts and not self._running:
            self._step_s = 0.0
            return
        self._chunk = 0.0
        if self._prompts:
            self._chunk = float(min(self.pace.chunk_tokens, self._prompts[0].prompt_tokens))
        self._step_s = self.pace.step_s(len(self._running), int(self._chunk))
        steps = math.inf
        if self._prompts:
            steps = max(0.0, self._prompt_left) / self._chunk
        if self._running:
            steps = min(steps, max(0.0, self._running[0][0] - self._tokens))
        version = self._version

        def look() -> None:
            if self._version == version:
                self._look()

        self.events.after(steps * self._step_s, look)

    def _look(self) -> None:
        self._advance()
        now_s = self.events.now_s
        if self._prompts and self._prompt_left <= 1e-6:
            request = self._prompts.popleft()
            if self._prompts:
                self._prompt_left = float(self._prompts[0].prompt_tokens)
            if math.isinf(request.first_token_s):
                request.first_token_s = now_s
                self.first(request)
            if request.left_tokens > 1:
                self._number += 1
                end = self._tokens + request.left_tokens - 1
                heapq.heappush(self._running, (end, self._number, request))
            else:
                self._end(request)
        while self._running and self._running[0][0] <= self._tokens + 1e-6:
            self._end(heapq.heappop(self._running)[2])
        self._plan()

    def _end(self, request: Request) -> None:
        request.finished_s = self.events.now_s
        self.ended(request)
