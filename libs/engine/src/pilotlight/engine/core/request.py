"""One request on one stage: its tokens, and how far its KV has come."""

from collections.abc import Sequence
from typing import NamedTuple

from pilotlight.policy.types import FinishReason, RequestId, Sampling


class RequestKey(NamedTuple):
    """One attempt at a request; another attempt is another request to the engine."""

    request_id: RequestId
    attempt: int


class Request:
    """Prompt and output as one row of tokens.

    There is no prefill and no decode state: a request has ``computed`` tokens in the KV cache and wants all of ``token_ids``
    there; the step that gets the last one in samples the next. A resumed request differs in nothing but its first row::

        token_ids   [ prompt_ids )[ output_ids, resumed or sampled here )
        computed    [ KV in place ............ )[ still to run .........)
    """

    __slots__ = ("blocks", "computed", "key", "max_context_tokens", "prompt_tokens", "sampling", "taken_s", "token_ids")

    def __init__(
        self, key: RequestKey, prompt_ids: Sequence[int], output_ids: Sequence[int], sampling: Sampling, max_context_tokens: int
    ) -> None:
        self.key = key
        self.prompt_tokens = len(prompt_ids)
        self.token_ids = [*prompt_ids, *output_ids]
        self.sampling = sampling
        self.max_context_tokens = max_context_tokens
        self.blocks: tuple[int, ...] = ()
        self.computed = 0
        self.taken_s = 0.0
        """When the stage took it up from the queue."""

    @property
    def position(self) -> int:
        """Output position of the token that comes next."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens that it can reach: what it needs room for."""
        return min(self.prompt_tokens + self.sampling.max_tokens, self.max_context_tokens)

    @property
    def exhausted(self) -> bool:
        """No further token may follow: ``max_tokens`` or the model's context is reached."""
        return len(self.token_ids) >= self.kv_tokens

    def accept(self, token_id: int) -> FinishReason | None:
        """Takes the sampled token in, unless it is a stop token, and says whether the request ends with it."""
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        self.token_ids.append(token_id)
        return FinishReason.LENGTH if self.exhausted else None
