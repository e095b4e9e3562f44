"""One request on one stage: its tokens, and how far its KV has come."""

import math
from collections.abc import Sequence
from typing import Protocol

from pilotlight.engine.core.blocks import BlockHash
from pilotlight.engine.core.counts import counts_of
from pilotlight.engine.core.lifecycle import RequestEvent, RequestState, step
from pilotlight.engine.core.pooled import PooledPrompt
from pilotlight.engine.core.prompt_scores import PromptScores
from pilotlight.policy.fairness import NO_TENANT, FairShare
from pilotlight.policy.pooling import PoolingMode
from pilotlight.policy.request import FinishReason, Promise, RequestKey, Sampling


class TokenControl(Protocol):
    """Says which token may come next (``pilotlight.engine.grammar``). It may need a while for
    it.
    """

    @property
    def late(self) -> bool:
        """A step had to do without what it says, and it has still not said it."""
        ...

    def accept(self, token_id: int) -> None:
        """The output has one token more."""
        ...

    def end(self) -> None:
        """The request has ended: nothing more is asked."""
        ...


class Request:
    """Prompt and output as one row of tokens.

    There is no prefill and no decode state: a request has ``computed`` tokens in the KV cache and
    wants all of ``token_ids`` there; the step that gets the last one in samples the next. A resumed
    request differs in nothing but its first row, a preempted one in nothing but that ``computed``
    is 0 again::

        token_ids   [ prompt_ids )[ output_ids, resumed or sampled here )
        computed    [ KV in place ............ )[ still to run .........)
    """

    __slots__ = (
        "block_hashes",
        "cached_tokens",
        "computed",
        "control",
        "counts",
        "deadline_s",
        "due_s",
        "first_position",
        "first_s",
        "key",
        "max_context_tokens",
        "pooled",
        "prompt_tokens",
        "queued_s",
        "sampling",
        "scores",
        "share",
        "state",
        "taken_s",
        "takes",
        "token_ids",
        "token_s",
    )

    def __init__(
        self,
        key: RequestKey,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Sampling,
        max_context_tokens: int,
        deadline_s: float | None = None,
    ) -> None:
        self.key = key
        self.prompt_tokens = len(prompt_ids)
        self.token_ids = [*prompt_ids, *output_ids]
        self.sampling = sampling
        self.max_context_tokens = max_context_tokens
        self.counts = counts_of(sampling, prompt_ids, output_ids)
        """What its penalties count; None without."""
        self.control: TokenControl | None = None
        self.deadline_s = deadline_s
        """On the engine's clock; it ends then, wherever it stands."""
        self.scores = (
            PromptScores(sampling.prompt_logprobs)
            if sampling.prompt_logprobs is not None and not output_ids
            else None
        )
        """Of its prompt, until they are told; None where nobody asks for them, or they were told by
        an earlier attempt."""
        self.pooled = PooledPrompt(sampling.pooled) if sampling.pooled is not None else None
        """Of its prompt, until it is told."""
        self.cached_tokens = 0
        """Of its prompt, those that were in place when it was first taken up."""
        self.state = RequestState.WAITING
        self.block_hashes: list[BlockHash] = []
        """Names of its full blocks, as far as they were asked for."""
        self.computed = 0
        self.share: FairShare = NO_TENANT
        self.due_s: float | None = None
        """When its first token is due, on the engine's clock; None: that is not promised."""
        self.token_s: float | None = None
        """What is promised of each token after the first, in mean."""
        self.first_s: float | None = None
        """When it got its first token here."""
        self.first_position = 0
        """Of that token."""
        self.queued_s = -math.inf
        """When it came, on the engine's clock; long ago, where that is not said."""
        self.taken_s = 0.0
        """When the stage first took it up from the queue."""
        self.takes = 0
        """How often it was taken up: what a batch of an earlier time computed for it is of no use
        now."""

    @property
    def position(self) -> int:
        """Output position of the token that comes next."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def wanted(self) -> int:
        """Tokens that are still to run before the next one is sampled.

        0 too while it is not known which token may come next: the last one waits, and takes no
        place in a step.
        """
        left = len(self.token_ids) - self.computed
        return 0 if left == 1 and self.control is not None and self.control.late else left

    @property
    def kv_tokens(self) -> int:
        """Tokens that it can reach: what it must have room for in the end."""
        reach = self.prompt_tokens + self.sampling.max_tokens
        # A prompt that is pooled is followed by nothing: it may fill the context.
        return reach if self.sampling.pooled is not None else min(reach, self.max_context_tokens)

    @property
    def reads_prompt(self) -> bool:
        """All of its prompt has to run: nothing of it may come from a cache."""
        mode = None if self.pooled is None else self.pooled.asked.mode
        return self.scores is not None or mode not in (None, PoolingMode.LAST)

    @property
    def exhausted(self) -> bool:
        """No further token may follow: ``max_tokens`` or the model's context is reached."""
        return len(self.token_ids) >= self.kv_tokens

    @property
    def left_tokens(self) -> int:
        """As many may follow at most."""
        return self.kv_tokens - len(self.token_ids)

    @property
    def about_to_end(self) -> bool:
        """The next token is the last one, whichever it is."""
        return self.left_tokens <= 1

    def stands(self, share: FairShare, promise: Promise | None, now_s: float) -> None:
        """Says on whose behalf it waits, and what is promised of it from now on."""
        self.share = share
        if promise is not None and promise.first_token_in_s is not None:
            self.due_s = now_s + promise.first_token_in_s
        self.token_s = promise.token_s if promise is not None else None

    def lead_s(self, now_s: float, grace_tokens: int, share: float = 1.0) -> float | None:
        """How long it can do without a token and still have all that it was given in a share of the
        time that was promised for so many, and ``grace_tokens`` more; None: it is promised none, or
        had none.
        """
        if self.token_s is None or self.first_s is None:
            return None
        given = self.position - self.first_position
        return self.first_s + share * self.token_s * (given + grace_tokens) - now_s

    def on(self, event: RequestEvent) -> None:
        """Moves to the state that follows.

        Raises:
            EngineFailed: the table has no such move.
        """
        self.state = step(self.state, event)

    def overdue(self, now_s: float) -> bool:
        """Its deadline has passed."""
        return self.deadline_s is not None and now_s >= self.deadline_s

    def accept(self, token_id: int) -> FinishReason | None:
        """Takes the sampled token in, unless it is a stop token, and says whether the request ends
        with it.
        """
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        self.token_ids.append(token_id)
        if self.exhausted:
            return FinishReason.LENGTH
        if self.counts is not None:
            self.counts.add(token_id)
        if self.control is not None:
            self.control.accept(token_id)
        return None

    def release(self) -> None:
        """It has ended: its grammar need not say which token comes next."""
        if self.control is not None:
            self.control.end()
