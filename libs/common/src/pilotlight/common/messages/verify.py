"""Gateway to loader: reading all of a model from its source, to compare it with the recorded
digests and to fill in what is missing.

It takes as long as reading takes, so it is started with one request and asked about with others.
"""

from enum import StrEnum

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Model

MAX_DIFFERENCES = 100
"""Differences that are named; all are counted."""


def verify_subject(node_id: NodeId) -> str:
    """Request/reply: ``Verify`` → ``Verification``."""
    return f"v1.loader.{node_id}.verify"


def verification_subject(node_id: NodeId) -> str:
    """Request/reply: ``AskVerification`` → ``Verification``."""
    return f"v1.loader.{node_id}.verification"


class VerificationStatus(StrEnum):
    """How a verification is doing."""

    WAITING = "waiting"
    """Another one is at work on its node."""
    RUNNING = "running"
    DONE = "done"
    """All was read: ``differences`` says whether it is what is recorded."""
    FAILED = "failed"
    """It could not be read to its end, for the error that is named."""


class Verify(Message, frozen=True, kw_only=True):
    """Start one, unless this model is being verified: then that one is meant."""

    model: Model
    deadline_s: float
    """It fails when it takes longer."""


class AskVerification(Message, frozen=True, kw_only=True):
    """How far is it?"""

    verification_id: str


class Verification(Message, frozen=True, kw_only=True):
    """One verification as it is now."""

    verification_id: str
    node_id: NodeId
    model: str
    status: VerificationStatus
    done_bytes: int
    total_bytes: int
    """Of the model's files."""
    filled_parts: int = 0
    """Parts whose digests had not been recorded, and are now."""
    difference_count: int = 0
    differences: tuple[str, ...] = ()
    """What is not as it was recorded or registered: file, part and range; the first of them."""
    code: str = ""
    """Of the error with which it failed."""
    error: str = ""
