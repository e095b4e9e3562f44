"""What the queue must know of a request that waits."""

import msgspec

from pilotlight.gateway.serving.route import Siblings
from pilotlight.gateway.serving.starts import ColdStart
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.ids import Digest, ModelName


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue must know of a request."""

    model: ModelName
    digest: Digest
    needed_tokens: int
    """KV room that it takes at most."""
    held_tokens: int
    """KV room that it takes up to its next token."""
    since_s: float
    """When it began to wait: its arrival, or when what had served it could do so no longer."""
    deadline_s: float
    trace_parent: str = ""
    siblings: Siblings = msgspec.field(default_factory=Siblings)
    cold_start: ColdStart = ColdStart.ALLOW
    share: FairShare = NO_TENANT
    """Of its project."""
    key_id: str = ""
    """Of the API key that pays."""
