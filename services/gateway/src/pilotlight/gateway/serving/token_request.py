"""What the API asks of the fleet, and what comes back: tokens in, tokens out."""

import math
from dataclasses import dataclass, field

from pilotlight.gateway.serving.route import Siblings
from pilotlight.gateway.serving.token_log import Token
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Model
from pilotlight.policy.request import FinishReason, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """One answer that is wanted."""

    request_id: RequestId
    model: Model
    prompt_ids: list[int]
    sampling: Sampling
    arrived_s: float
    trace_parent: str = ""
    shorten: bool = False
    """The client named no limit: ``sampling.max_tokens`` may be cut to what an instance's KV has
    room for."""
    siblings: Siblings = field(default_factory=Siblings)
    deadline_s: float = math.inf
    """When it must have ended, on this gateway's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """No tokens yet: how many are ahead, and how far the model's start has come."""

    ahead: int
    phase: str
    fetched: float | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens, in order, each once."""

    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine ended it: ``stop`` or ``length``."""

    finish: FinishReason


Update = Held | Tokens | Ended
