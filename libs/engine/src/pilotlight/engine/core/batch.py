"""What one forward pass runs, without tensors: the same batch goes through every stage of an
instance.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from pilotlight.engine.core.pooled import PoolReading
from pilotlight.engine.core.prompt_scores import Reading
from pilotlight.engine.core.request import Request
from pilotlight.policy.pooling import PoolingMode


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, start + count) of one request, and where the stage keeps its KV.

    ::

        positions   0 ........ start ........ start + count
                    [ KV in place )[ this step )
    """

    start: int
    count: int
    blocks: tuple[int, ...]
    """Those of its first ``start + count`` positions, in order; it may have more. Those that others
    own too lie below ``start``."""
    wants_logits: bool
    """The last token's logits are asked for; false in the middle of a prompt."""

    @property
    def stop(self) -> int:
        """Tokens of the request whose KV is in place after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments of different requests, one after the other: row i of every tensor is token i of
    their concatenation, unpadded.
    """

    segments: tuple[Segment, ...]
    readings: tuple[Reading, ...] = ()
    """Rows of prompts whose tokens are to be scored by whichever stage ends the model."""
    poolings: tuple[PoolReading, ...] = ()
    """Rows of which it makes vectors or scores."""

    @property
    def num_tokens(self) -> int:
        """Rows of every tensor."""
        return sum(segment.count for segment in self.segments)

    @property
    def reads(self) -> bool:
        """More is looked at than each segment's last row."""
        return bool(self.readings or self.poolings)


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch, the requests that it belongs to, and what it took to make it."""

    requests: tuple[Request, ...]
    batch: Batch
    """One segment for each request."""
    preempted: int
    """Requests that gave up their blocks for it."""
    prefix_looked_up_tokens: int
    """Tokens of the requests that run for the first time."""
    prefix_hit_tokens: int
    """As many of those were in place."""

    @property
    def token_ids(self) -> list[int]:
        """What the first stage embeds, row by row."""
        return [
            token_id
            for request, segment in zip(self.requests, self.batch.segments, strict=True)
            for token_id in request.token_ids[segment.start : segment.stop]
        ]

    def only(self, kept: Container[int]) -> "Plan":
        """The same for some of the requests, by their places."""
        places = [place for place in range(len(self.requests)) if place in kept]
        segments = tuple(self.batch.segments[place] for place in places)
        return replace(
            self, requests=tuple(self.requests[place] for place in places), batch=Batch(segments)
        )

    @property
    def sampled(self) -> tuple[Request, ...]:
        """Requests that get a token from this batch, in the order of the logits' rows."""
        return tuple(
            request
            for request, segment in zip(self.requests, self.batch.segments, strict=True)
            if segment.wants_logits
        )


def readings_of(requests: Sequence[Request], segments: Sequence[Segment]) -> tuple[Reading, ...]:
    """What a batch of these is to say of prompts.

    The row before a prompt's last token is the last that is read: what follows the last is output.
    """
    readings: list[Reading] = []
    row = 0
    for request, segment in zip(requests, segments, strict=True):
        stop = min(segment.stop + 1, request.prompt_tokens)
        if request.scores is not None and stop > segment.start + 1:
            targets = tuple(request.token_ids[segment.start + 1 : stop])
            readings.append(Reading(row, segment.start, targets, request.scores))
        row += segment.count
    return tuple(readings)


def poolings_of(
    requests: Sequence[Request], segments: Sequence[Segment]
) -> tuple[PoolReading, ...]:
    """Of which rows a batch of these makes vectors: all of a prompt's, or those of the chunk that
    ends it where the last one counts alone.
    """
    poolings: list[PoolReading] = []
    row = 0
    for request, segment in zip(requests, segments, strict=True):
        pooled = request.pooled
        ends = segment.stop >= request.prompt_tokens
        if pooled is not None and (ends or pooled.asked.mode is not PoolingMode.LAST):
            rows = slice(row, row + segment.count)
            poolings.append(PoolReading(rows, segment.start, request.prompt_tokens, pooled))
        row += segment.count
    return tuple(poolings)
