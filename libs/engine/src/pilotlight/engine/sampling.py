"""The next tokens of requests: what the sampler is given, and what comes of a request that gets
none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.compute import Sampler
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.sampler import NotSampled, SampledToken
from pilotlight.engine.errors import BadRequest, EngineError, EngineFailed
from pilotlight.engine.grammar.client import Session
from pilotlight.engine.grammar.frames import Verdict
from pilotlight.engine.results import Released
from pilotlight.policy.request import FinishReason

GRACE_S = 0.005
"""How long a batch that has run waits for a verdict on some of its requests. Those that get none
then run their last token again."""

Outcome = SampledToken | NotSampled | Verdict
"""A token; why there is none; a verdict after which none may follow."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a grammar lets a request's next token be."""

    mask: bytes = b""
    """A bit for each token, lowest first."""
    may_end: bool = False
    known: bool = True
    """False: no token can be sampled, because the verdict is not there yet, or because it is that
    none may follow."""


def sample_requests(logits: Tensor, requests: Sequence[Request], sample: Sampler) -> list[Outcome]:
    """Samples the next token of each request, from its row of logits."""
    return settle(requests, sample_allowed(logits, requests, look_up(requests), sample))


def look_up(requests: Sequence[Request]) -> tuple[Allowed | None, ...]:
    """What the grammars of requests allow next; None for one without a grammar.

    Waits a moment for verdicts that are on their way.
    """
    sessions = [request.control for request in requests if isinstance(request.control, Session)]
    _wait([session for session in sessions if session.opened])
    return tuple(
        _allowed(request.control) if isinstance(request.control, Session) else None
        for request in requests
    )


def sample_allowed(
    logits: Tensor, requests: Sequence[Request], allowed: Sequence[Allowed | None], sample: Sampler
) -> list[SampledToken | NotSampled]:
    """Samples the rows for which the allowed tokens are known.

    Args:
        logits: [num_requests, vocab_size].
        requests: one for each row; they may be copies that know nothing of grammars.
        allowed: what the grammar of each allows; None: it has none.
        sample: the stage's sampler.
    """
    sampled: list[SampledToken | NotSampled] = [NotSampled.LATE] * len(requests)
    rows = [row for row, one in enumerate(allowed) if one is None or one.known]
    if rows:
        chosen = logits if len(rows) == len(requests) else logits[torch.tensor(rows)]
        specs = [_spec_of(requests[row], allowed[row]) for row in rows]
        for row, token in zip(rows, sample(chosen, specs), strict=True):
            sampled[row] = token
    return sampled


def settle(
    requests: Sequence[Request], sampled: Sequence[SampledToken | NotSampled]
) -> list[Outcome]:
    """Tells, of the requests for which nothing could be sampled, those that end from those that
    wait.
    """
    outcomes: list[Outcome] = list(sampled)
    for row, request in enumerate(requests):
        if sampled[row] is NotSampled.LATE and isinstance(request.control, Session):
            verdict = request.control.verdict
            if verdict is not None and (verdict.complete or verdict.code):
                outcomes[row] = verdict
            else:
                request.control.missed()
    return outcomes


def wait_for_late(requests: Sequence[Request]) -> None:
    """Waits a moment when nothing can run before a verdict comes."""
    _wait(
        [
            request.control
            for request in requests
            if isinstance(request.control, Session) and request.control.late
        ][:1]
    )


def give(
    scheduler: BatchScheduler, request: Request, sampled: Outcome, sampled_s: float
) -> Produced | None:
    """Gives a request its token, and ends it if that was the last, or if there is none.

    Args:
        scheduler: of the request's stage.
        request: that was sampled.
        sampled: what came of it.
        sampled_s: when, on the engine's clock.
    """
    if sampled is NotSampled.LATE:
        scheduler.postpone(request)
        return None
    if not isinstance(sampled, SampledToken):
        scheduler.end(request, RequestEvent.FINISH)
        return unanswered(request, sampled)
    scheduler.vouch(request)
    position = request.position
    if request.first_s is None:
        request.first_s, request.first_position = sampled_s, position
    finish = request.accept(sampled.token_id)
    if finish is not None:
        scheduler.end(request, RequestEvent.FINISH)
    return told(request, position, sampled, finish)


def unanswered(request: Request, outcome: NotSampled | Verdict) -> Produced:
    """The end of a request that gets no token more."""
    match outcome:
        case Verdict() if not outcome.code:
            return ended(request, FinishReason.STOP)
        case Verdict():
            error: EngineError = verdict_error(outcome)
        case NotSampled.NOT_FINITE:
            error = EngineFailed(f"the logits of output token {request.position} are not finite")
        case NotSampled.NOTHING_LEFT:
            error = BadRequest(
                f"grammar, min_tokens and stop tokens together leave no token for output position {request.position}"
            )
        case NotSampled.LATE:
            error = EngineFailed("a request was ended whose grammar was still being looked at")
    return ended(request, FinishReason.ERROR, error)


def verdict_error(verdict: Verdict) -> EngineError:
    """What a verdict with a code says."""
    return (BadRequest if verdict.code == BadRequest.code else EngineFailed)(verdict.message)


def ended(request: Request, finish: FinishReason, error: EngineError | None = None) -> Produced:
    """The last word on a request that gets no token with it."""
    return Produced(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        position=request.position,
        finish=finish,
        code=error.code if error else "",
        message=error.message if error else "",
    )


def released(request: Request) -> Released:
    """What another engine needs to go on with a request."""
    return Released(
        prompt_ids=tuple(request.token_ids[: request.prompt_tokens]),
        output_ids=tuple(request.token_ids[request.prompt_tokens :]),
        sampling=request.sampling,
        deadline_s=request.deadline_s,
    )


def told(
    request: Request, position: int, sampled: SampledToken, finish: FinishReason | None
) -> Produced:
    """A token, as far as the request's owner is to see it: a stop token is none of the output. With
    the first, what is told of the prompt.

    Args:
        request: whose token it is.
        position: the token's, in the output, from 0.
        sampled: the token.
        finish: why the request ends with it; None: it goes on.
    """
    kept = () if finish is FinishReason.STOP else (sampled,)
    scores, request.scores = request.scores, None
    asked = request.sampling.logprobs
    return Produced(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        position=position,
        token_ids=tuple(token.token_id for token in kept),
        logprobs=tuple(token.logprob for token in kept if token.logprob is not None)
        if asked
        else None,
        top_logprobs=tuple(token.top for token in kept)
        if asked and request.sampling.top_logprobs
        else None,
        finish=finish,
        cached_tokens=0 if position else request.cached_tokens,
        prompt=None if scores is None else scores.told,
        vector=None if request.pooled is None else request.pooled.vector,
    )


def _spec_of(request: Request, allowed: Allowed | None) -> SampleSpec:
    return SampleSpec(
        request.sampling,
        request.position,
        counts=request.counts,
        allowed=None if allowed is None else allowed.mask,
        may_end=allowed is None or allowed.may_end,
    )


def _allowed(session: Session) -> Allowed:
    verdict = session.verdict
    if verdict is None or verdict.complete or verdict.code:
        return Allowed(known=False)
    return Allowed(verdict.allowed, verdict.accepting)


def _wait(sessions: Sequence[Session]) -> None:
    if sessions:
        sessions[0].helper.wait(sessions, GRACE_S)
