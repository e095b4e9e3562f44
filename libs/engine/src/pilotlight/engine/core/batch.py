"""What one forward pass runs, without tensors: the same batch goes through every stage of an instance."""

from dataclasses import dataclass

from pilotlight.engine.core.request import Request


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
    """All blocks of the request, in order of its positions."""
    wants_logits: bool
    """The last token's logits are asked for; false in the middle of a prompt."""

    @property
    def stop(self) -> int:
        """Tokens of the request whose KV is in place after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments of different requests, one after the other: row i of every tensor is token i of their concatenation, unpadded."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch, and whose it is."""

    requests: tuple[Request, ...]
    batch: Batch
    """One segment for each request."""

    @property
    def token_ids(self) -> list[int]:
        """What the first stage embeds, row by row."""
        return [
            token_id
            for request, segment in zip(self.requests, self.batch.segments, strict=True)
            for token_id in request.token_ids[segment.start : segment.stop]
        ]

    @property
    def sampled(self) -> tuple[Request, ...]:
        """Requests that get a token from this batch, in the order of the logits' rows."""
        return tuple(request for request, segment in zip(self.requests, self.batch.segments, strict=True) if segment.wants_logits)
