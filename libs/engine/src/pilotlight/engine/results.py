"""What the facade answers: frozen records, free of tensors."""

from dataclasses import dataclass

from pilotlight.policy.types import FinishReason, InstanceId, RequestId, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """How a stage's device bytes are divided.

    ::

        device_bytes  [ parameter_bytes | kv_capacity_tokens * kv_bytes_per_token | less than one block, and what granules waste ]
    """

    parts: tuple[int, ...]
    """Parts that have to be placed, in execution order."""
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    """Whole blocks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    """What it took to place one part. Both times are zero when the part was in place already."""

    copy_s: float
    """Out of the given buffers into the engine's own memory."""
    convert_s: float
    """From the checkpoint's dtype into the stage's."""
    ready: bool
    """Every part of the stage is in place now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """What one step gave one request. Every request that was added gets exactly one with a ``finish``."""

    request_id: RequestId
    attempt: int
    position: int
    """Output position of the first of ``token_ids``; the number of output tokens so far when there are none."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """As many as tokens, if the request asked for them."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """Of each token, ids and log probabilities of the most probable ones, if the request asked for them."""
    finish: FinishReason | None = None
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrefill:
    """From when a stage took up its first request until that request's first token was sampled."""

    instance_id: InstanceId
    request_id: RequestId
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPipeline:
    """A stage that is connected to no others any more. It is still held; its requests have ended."""

    instance_id: InstanceId
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A request that left in mid-generation: what another engine needs to go on with it, beside its KV."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step's output, what it took, and what the engine holds after it (sums over all resident stages)."""

    produced: tuple[Produced, ...]
    waiting: int
    """Requests that own no KV blocks: not taken up yet, or preempted."""
    running: int
    kv_free_tokens: int
    """Room that no request owns."""
    step_time_s: float
    first_prefills: tuple[FirstPrefill, ...]
    kv_used_tokens: int = 0
    """Room in blocks that requests own, filled or not."""
    kv_cached_tokens: int = 0
    """As much of the free room holds prefixes that can still be shared."""
    batch_tokens: int = 0
    """Tokens that the step ran through the model, of prompts and outputs."""
    prefix_looked_up_tokens: int = 0
    """Tokens of the requests that were taken up for the first time."""
    prefix_hit_tokens: int = 0
    """As many of those were found in the prefix cache."""
    preemptions: int = 0
    """Requests that gave up their blocks to older ones and will run again."""
    lost: tuple[LostPipeline, ...] = ()
    turn_of: InstanceId | None = None
    """Whose batch ran, or went on as far as its parts are in place."""
