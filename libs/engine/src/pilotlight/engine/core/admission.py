"""Which requests a stage takes at all.

What it takes, it can serve: sooner or later there is room for it.
"""

from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import BadRequest, ContextTooLong, NoRoom
from pilotlight.policy.model import ModelSpec
from pilotlight.policy.pooling import Task
from pilotlight.policy.request import MAX_PROMPT_VALUES, Sampling

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0, 1e6),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "top_logprobs": (0, 20),
}
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_PROMPT_TOP = 20


def check_request(spec: ModelSpec, kv_capacity_tokens: int, request: Request) -> None:
    """Refuses a request that can never be served.

    1. Without a prompt there is nothing to continue.
    2. Every id is in the vocabulary.
    3. The sampling parameters are in their ranges.
    4. The prompt leaves room for one token in the model's context; one that is pooled may fill it.
    5. The stage's whole KV cache holds the tokens that the request can reach.
    6. It asks for what the model gives: text, or a vector or score.

    Raises:
        BadRequest: rules 1 to 3, and 6.
        ContextTooLong: rule 4.
        NoRoom: rule 5.
    """
    sampling = request.sampling
    if not request.prompt_tokens:  # 1
        raise BadRequest("the prompt is empty")
    strange = next(
        (token_id for token_id in request.token_ids if not 0 <= token_id < spec.vocab_size), None
    )  # 2
    if strange is not None:
        raise BadRequest(f"token id {strange} is outside the vocabulary of {spec.vocab_size}")
    check_sampling(sampling, spec.vocab_size)  # 3
    check_prompt_logprobs(sampling, request.prompt_tokens)
    check_pooled(spec, sampling, request.prompt_tokens)  # 6
    if request.prompt_tokens >= spec.max_context_tokens + (sampling.pooled is not None):  # 4
        raise ContextTooLong(
            f"the prompt has {request.prompt_tokens} tokens; with output, the model's context holds {spec.max_context_tokens}"
        )
    check_kv_room(kv_capacity_tokens, request)  # 5


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Refuses parameters that are out of range: with them, logits could overflow.

    Raises:
        BadRequest: one is; the message names it.
    """
    for name, (low, high) in _RANGES.items():
        value: float = getattr(sampling, name)
        if not low <= value <= high or (name == "top_p" and value == 0):
            raise BadRequest(f"{name} {value} is not in its range, {low} to {high}")
    if len(sampling.logit_bias) > MAX_BIASES or len(
        {token_id for token_id, _ in sampling.logit_bias}
    ) < len(sampling.logit_bias):
        raise BadRequest(f"logit_bias has more than {MAX_BIASES} tokens, or one of them twice")
    for token_id, bias in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(
                f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size}"
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise BadRequest(f"logit_bias: {bias} is not in its range, {-MAX_BIAS} to {MAX_BIAS}")


def check_pooled(spec: ModelSpec, sampling: Sampling, prompt_tokens: int) -> None:
    """Refuses text of a model that gives vectors or scores, these of one that gives text, and what
    contradicts the model.

    Raises:
        BadRequest: it is so; the message says how.
    """
    pooled, pooling = sampling.pooled, spec.pooling
    if pooled is None or pooling is None:
        if pooled is not None or spec.task is Task.EMBED or spec.encoder is not None:
            raise BadRequest(f"the model's task is {spec.task}, and something else is asked of it")
        return
    plain = (sampling.max_tokens, sampling.grammar, sampling.prompt_logprobs) == (1, None, None)
    second = pooled.second_starts
    if (
        not plain
        or pooled.mode is not pooling.mode
        or len(pooled.answers) != len(pooling.answers)
        or any(not 0 <= token_id < spec.vocab_size for token_id in pooled.answers)
    ):
        raise BadRequest("a vector or score is asked for in another way than the model has it")
    if pooled.dimensions is not None and not 1 <= pooled.dimensions <= spec.hidden_size:
        raise BadRequest(f"{pooled.dimensions} dimensions are not within 1 and {spec.hidden_size}")
    types = 1 if spec.encoder is None else spec.encoder.num_types
    if second is not None and (types < 2 or not 0 <= second <= prompt_tokens):
        raise BadRequest(
            f"a second text from token {second} on is not one that the model tells apart"
        )


def check_prompt_logprobs(sampling: Sampling, prompt_tokens: int) -> None:
    """Refuses to tell more of a prompt than one message may hold.

    Raises:
        BadRequest: it is more.
    """
    wanted = sampling.prompt_logprobs
    if wanted is None:
        return
    if not 0 <= wanted <= MAX_PROMPT_TOP or prompt_tokens * (wanted + 1) > MAX_PROMPT_VALUES:
        raise BadRequest(
            f"prompt_logprobs {wanted} for {prompt_tokens} tokens: at most {MAX_PROMPT_TOP}, and {MAX_PROMPT_VALUES} values in all"
        )


def check_kv_room(kv_capacity_tokens: int, request: Request) -> None:
    """Refuses a request for which there would not be room if it were alone; with others it then
    waits, but not for ever.

    Raises:
        NoRoom: the whole KV cache does not hold the tokens that it can reach.
    """
    if request.kv_tokens > kv_capacity_tokens:
        raise NoRoom(
            f"prompt and max_tokens come to {request.kv_tokens} tokens; the KV cache of this instance holds {kv_capacity_tokens}"
        )
