"""What is asked: the demand for a model, how a request's tokens are sampled, and why it ended."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pilotlight.policy.ids import Digest, ModelName, RequestId
from pilotlight.policy.pooling import Pooled

MAX_PROMPT_VALUES = 150_000
"""Log probabilities that are told of one prompt: more would not fit into a message of the bus."""


class RequestKey(NamedTuple):
    """One attempt at a request: what a submit is idempotent by.

    To an engine another attempt is another request.
    """

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests for one model that some gateway holds."""

    model: ModelName
    waiting: int
    oldest_age_s: float
    """Ages, not times: gateways and schedulers share no clock. A reader adds what has passed since
    it heard."""
    deadline_in_s: float
    """Until the earliest deadline among the held requests; negative when it has passed."""
    arrivals: int = 0
    """Of a release without the message ``Arrivals``, as is the next; not read."""
    window_s: float = 1.0
    trace_parent: str = ""
    """W3C trace context of the oldest waiting request: the cold start joins its trace."""
    prompt_tokens: int = 0
    """Of the oldest waiting request, with what it was answered before; 0: nobody says."""

    def aged(self, by_s: float) -> "Demand":
        """The same, so much later."""
        # Of many models, many times a second: ``replace`` takes three times as long.
        return Demand(
            model=self.model,
            waiting=self.waiting,
            oldest_age_s=self.oldest_age_s + by_s,
            deadline_in_s=self.deadline_in_s - by_s,
            trace_parent=self.trace_parent,
            prompt_tokens=self.prompt_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a model's SLO says of one of its requests, as far as that is still to come."""

    first_token_in_s: float | None = None
    """Until its first token is due; negative when that has passed. None: it had one already."""
    token_s: float | None = None
    """Of each token after the first, in mean."""


NO_PROMISE = Promise()


class FinishReason(StrEnum):
    """Why an engine ended a request."""

    STOP = "stop"
    """An end-of-sequence or stop token was sampled. The token itself is not part of the output."""
    LENGTH = "length"
    """``max_tokens`` or the model's context is reached."""
    CANCELLED = "cancelled"
    ERROR = "error"


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """The dialect of Lark that llguidance takes."""
    CHOICE = "choice"
    """A JSON array of strings: the output is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must look like, from its first character to its last."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Where a worker has a model's tokenizer: what its grammars need to know which token writes
    what.
    """

    path: str
    """Of a ``tokenizer.json``. Another one may be there later."""
    eos_token_ids: tuple[int, ...] = ()
    text_digest: Digest = Digest("")
    """Tells it apart from those at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are drawn. Stateless: noise for token i is Philox(key = seed, counter
    = i), and all else follows from
    the tokens before it.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch their filters off,
    ``presence_penalty`` and ``frequency_penalty`` 0 and ``repetition_penalty`` 1 the penalties.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one's probability are out."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as the output has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or output have.
    """
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens, by id."""
    min_tokens: int = 0
    """No stop token before this number of others."""
    top_logprobs: int = 0
    """How many of the most probable tokens are told with each token, when ``logprobs`` is set."""
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """How many of the most probable tokens are told in the place of each token of the prompt,
    beside that token itself; None: nothing of the prompt."""
    pooled: Pooled | None = None
    """The answer is the prompt's vector or score; of tokens there is one, which says nothing. None:
    the prompt is continued."""
