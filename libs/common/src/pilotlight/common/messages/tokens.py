"""Gateway and worker: submit, token batches, acknowledgement, resend, cancel.

Output positions count from the request's first output token, whichever instance made it. ``seq`` of
an entry is the position of its first token::

    position    0  1  2  3  4  5
    entries     [seq 0 ) [seq 3) [seq 4, finish)
"""

from msgspec import field

from pilotlight.common.messages.codec import Message
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.ids import GatewayId, InstanceId, ModelName, RequestId, WorkerId
from pilotlight.policy.request import NO_PROMISE, FinishReason, Promise, Sampling


def submit_subject(worker_id: WorkerId) -> str:
    """Request/reply: ``Submit`` → ``SubmitReply`` within 500 ms."""
    return f"v1.worker.{worker_id}.submit"


def cancel_subject(worker_id: WorkerId) -> str:
    """``Cancel``, obeyed within one step."""
    return f"v1.worker.{worker_id}.cancel"


def ack_subject(worker_id: WorkerId) -> str:
    """``Ack``, once a second and at the end of a request."""
    return f"v1.worker.{worker_id}.ack"


def resend_subject(worker_id: WorkerId) -> str:
    """Request/reply: ``Resend`` → ``TokenBatch``."""
    return f"v1.worker.{worker_id}.resend"


def tokens_subject(gateway_id: GatewayId) -> str:
    """``TokenBatch`` in msgpack."""
    return f"v1.tokens.{gateway_id}"


class Submit(Message, frozen=True, kw_only=True):
    """Run a request. Its key is (request_id, attempt): a repeated submit is answered from
    memory.
    """

    request_id: RequestId
    attempt: int
    gateway_id: GatewayId
    instance_id: InstanceId
    model: ModelName
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list[int])
    """What earlier attempts already delivered; the engine goes on after it."""
    sampling: Sampling
    deadline_in_s: float | None = None
    """Seconds from now within which it must end; past them it ends with ``deadline_exceeded``.
    None: it may take its time."""
    share: FairShare = NO_TENANT
    """Its tenant's, of the engine's turns."""
    promise: Promise = NO_PROMISE
    """What its model's SLO says, from now on; a release that does not know it gives none."""
    whole: bool = False
    """Nobody looks at its output before it has ended: after the first ones, tokens need not leave
    with each step. A worker that does not know this sends them all the same."""
    moved_from: InstanceId | None = None
    """The instance at which the attempt before ran: its engine may have keys and values of these
    tokens still. None: there was none, or the gateway's release does not say."""


class SubmitReply(Message, frozen=True, kw_only=True):
    """Accepted, or refused with a code of the error taxonomy."""

    accepted: bool
    code: str = ""
    message: str = ""
    retry_after_s: float = 0.0


class TokenEntry(Message, frozen=True, kw_only=True):
    """Consecutive output tokens of one request."""

    request_id: RequestId
    attempt: int
    seq: int
    token_ids: list[int]
    logprobs: list[float | None] | None = None
    """Of the chosen tokens, when the request asked for them. None among them: not known, or not
    finite, which JSON cannot say."""
    finish: FinishReason | None = None
    code: str = ""
    message: str = ""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Of each token, ids and log probabilities of the most probable ones, when the request asked
    for them."""
    cached_tokens: int = 0
    """Of an entry with ``seq`` 0: as many tokens of the prompt were found in the prefix cache."""
    prompt: PromptLogprobs | None = None
    """Of an entry with ``seq`` 0, when the request asked for it."""
    vector: bytes | None = None
    """Of the entry of a request that is pooled: its vector or score, float32 and lowest byte
    first."""
    device_s: float = 0.0
    """Device-seconds that this attempt had up to its last token here (``policy.device_time``); 0:
    of a release that does not say."""


class TokenBatch(Message, frozen=True, kw_only=True):
    """One engine step's tokens for one gateway.

    The envelope of one with the first tokens of a request says when they were sampled: ``deliver``
    begins then.
    """

    worker_id: WorkerId
    entries: list[TokenEntry]


class AckEntry(Message, frozen=True, kw_only=True):
    """Every token before ``seq`` has arrived; ``done`` lets the worker forget the request."""

    request_id: RequestId
    attempt: int
    seq: int
    done: bool = False


class Ack(Message, frozen=True, kw_only=True):
    """What a gateway has received from a worker."""

    gateway_id: GatewayId
    entries: list[AckEntry]


class Resend(Message, frozen=True, kw_only=True):
    """Ask for a request's tokens again, from a position on."""

    request_id: RequestId
    attempt: int
    from_seq: int


class Cancel(Message, frozen=True, kw_only=True):
    """Requests that no client waits for any more."""

    gateway_id: GatewayId
    request_ids: list[RequestId]
