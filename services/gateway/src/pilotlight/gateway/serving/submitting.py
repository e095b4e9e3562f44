"""An attempt's submit: the sampling that an instance has room for, and the worker's answer."""

from collections.abc import Callable
from dataclasses import replace

from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.messages.tokens import Submit, SubmitReply
from pilotlight.gateway.serving.relay import Attempt, Relay
from pilotlight.gateway.serving.token_request import TokenRequest
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.request import Sampling

SUBMIT_TRIES = 3
"""How often one submit is repeated while no answer comes; it is answered from memory."""


async def submitted(
    relay: Relay, attempt: Attempt, message: Callable[[], Submit], worker_id: WorkerId
) -> SubmitReply:
    """The worker's answer to an attempt's submit, which is repeated while none comes.

    Args:
        relay: carries it.
        attempt: tokens of it are an answer too.
        message: makes the submit, for each try anew: the time that is left is in it.
        worker_id: who is asked.

    Raises:
        PilotlightError: there was no answer.
    """
    for tries in range(1, SUBMIT_TRIES + 1):
        try:
            return await relay.submit(attempt, message(), worker_id)
        except DeadlineExceeded:
            if attempt.accepted:
                break
            if attempt.error is not None or tries == SUBMIT_TRIES:
                raise
    return SubmitReply(accepted=True)


def sampling_on(
    request: TokenRequest, before: Sampling, output_tokens: int, room_tokens: int
) -> Sampling:
    """The request's sampling, with no more output than the instance has KV for when the client left
    it open.

    Args:
        request: the request.
        before: the sampling of the attempt before.
        output_tokens: what there is of the answer.
        room_tokens: what the instance has KV for; 0 where that is not known.
    """
    # Once there is output, another instance with more room must not make the answer longer than the
    # first would have.
    sampling = before if output_tokens else request.sampling
    if not request.shorten or not room_tokens:
        return sampling
    # What is there already is never cut, and one token more can always be asked for: the instance
    # refuses what it cannot hold.
    room_left = max(room_tokens - len(request.prompt_ids), output_tokens + 1)
    return replace(sampling, max_tokens=min(sampling.max_tokens, room_left))
