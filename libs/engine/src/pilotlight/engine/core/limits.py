"""Limits of batching: what one step may hold, and how many requests may run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How an engine batches."""

    step_tokens: int = 512
    """Tokens of one forward pass, streams and chunks of prompts together, so that no prompt holds
    up the streams for long."""
    chunk_tokens: int | None = None
    """Of one prompt in a step that also gives running requests their next tokens; None: as many as
    the step holds. A long prompt then stretches many steps a little, not one of them by its whole
    time; short ones still share a step. It has as few pieces of at most half as many more as there
    can be, of about one length."""
    running: int = 256
    """Requests that own blocks at once; at most ``step_tokens``, so that each stream gets its token
    in every step."""
    gather_s: float = 0.0
    """How long new requests wait for each other, to share their first step (``gathering``)."""
    gather_running: int = 16
    """They do so, and wait for a batch's end, while more than these run."""
    ending_s: float = 0.0
    """How long new requests wait for a batch that is about to end (``ending``)."""
    keep_promises: bool = False
    """Steps are shared so that promises are kept (``promises``)."""
    prefix_cache: bool = True
    """Requests share the blocks of equal prefixes, also with those that have ended."""

    def __post_init__(self) -> None:
        if not 1 <= self.running <= self.step_tokens:
            raise ValueError(
                f"running must be in [1, step_tokens], not {self.running} of {self.step_tokens}"
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be 1 at least, not {self.chunk_tokens}")
