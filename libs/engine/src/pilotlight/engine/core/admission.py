"""Which requests a stage takes at all. What it takes, it can serve: sooner or later there is room for it."""

from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import BadRequest, ContextTooLong, NoRoom
from pilotlight.policy.types import ModelSpec


def check_request(spec: ModelSpec, kv_capacity_tokens: int, request: Request) -> None:
    """Refuses a request that can never be served.

    1. Without a prompt there is nothing to continue.
    2. Every id is in the vocabulary.
    3. The sampling parameters are in their ranges.
    4. The prompt leaves room for one token in the model's context.
    5. The stage's whole KV cache holds the tokens that the request can reach.

    Raises:
        BadRequest: rules 1 to 3.
        ContextTooLong: rule 4.
        NoRoom: rule 5.
    """
    sampling = request.sampling
    if not request.prompt_tokens:  # 1
        raise BadRequest("the prompt is empty")
    strange = next((token_id for token_id in request.token_ids if not 0 <= token_id < spec.vocab_size), None)  # 2
    if strange is not None:
        raise BadRequest(f"token id {strange} is outside the vocabulary of {spec.vocab_size}")
    if sampling.max_tokens < 1:  # 3
        raise BadRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if not (0.0 <= sampling.temperature < float("inf") and 0.0 < sampling.top_p <= 1.0 and sampling.top_k >= 0):
        raise BadRequest(
            f"temperature {sampling.temperature}, top_p {sampling.top_p} and top_k {sampling.top_k} are not all in their ranges"
        )
    if request.prompt_tokens >= spec.max_context_tokens:  # 4
        raise ContextTooLong(
            f"the prompt has {request.prompt_tokens} tokens; with output, the model's context holds {spec.max_context_tokens}"
        )
    check_kv_room(kv_capacity_tokens, request)  # 5


def check_kv_room(kv_capacity_tokens: int, request: Request) -> None:
    """Refuses a request for which there would not be room if it were alone; with others it then waits, but not for ever.

    Raises:
        NoRoom: the whole KV cache does not hold the tokens that it can reach.
    """
    if request.kv_tokens > kv_capacity_tokens:
        raise NoRoom(
            f"prompt and max_tokens come to {request.kv_tokens} tokens; the KV cache of this instance holds {kv_capacity_tokens}"
        )
