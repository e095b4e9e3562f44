"""What the API asks of the fleet, and what comes back: tokens in, tokens out."""

import math
from array import array
from collections.abc import Awaitable, Callable

import msgspec

from pilotlight.common.errors import PilotlightError
from pilotlight.gateway.serving.route import Siblings
from pilotlight.gateway.serving.starts import ColdStart
from pilotlight.gateway.serving.token_log import PromptRead, Token
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Model
from pilotlight.policy.request import FinishReason, Sampling


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that is wanted."""

    request_id: RequestId
    model: Model
    prompt_ids: "array[int]"
    """In four bytes each: a list of as many numbers takes nine times as much, and requests wait."""
    sampling: Sampling
    arrived_s: float
    trace_parent: str = ""
    shorten: bool = False
    """The client named no limit: ``sampling.max_tokens`` may be cut to what an instance's KV has
    room for."""
    siblings: Siblings = msgspec.field(default_factory=Siblings)
    cold_start: ColdStart = ColdStart.ALLOW
    deadline_s: float = math.inf
    """When it must have ended, on this gateway's clock."""
    share: FairShare = NO_TENANT
    """Of its project."""
    key_id: str = ""
    """Of the API key that pays."""
    whole: bool = False
    """Nobody looks at its tokens before it has ended: they may come together (``Submit.whole``)."""


class Held(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """No tokens yet: how many are ahead, and how far the model's start has come."""

    ahead: int
    phase: str
    fetched: float | None
    elapsed_s: float


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Output tokens, in order, each once."""

    tokens: list[Token]
    read: PromptRead | None = None
    """What the attempt that gave them says of the prompt."""
    device_s: float = 0.0
    """Device-seconds of the request so far, all attempts together."""
    finish: FinishReason | None = None
    """The engine ended it with these, or after those before: ``stop`` or ``length``."""


Update = Held | Tokens
Listener = Callable[[Update], Awaitable[bool]]
"""Takes what happens to a request. True: it wants no more, and what still runs is cancelled."""


class ListenerFailed(Exception):
    """Keeps a listener's error apart from those of attempts, which are tried again."""

    def __init__(self, error: PilotlightError) -> None:
        super().__init__(error.message)
        self.error = error
