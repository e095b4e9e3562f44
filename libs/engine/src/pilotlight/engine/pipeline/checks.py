"""What a stage refuses of the one that leads: what would read or write what is not there."""

from collections.abc import Sequence

from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.pipeline.frames import HiddenStates


def check_batch(header: HiddenStates, num_blocks: int) -> None:
    """Refuses a micro-batch that does not lie in the KV blocks of a stage.

    Raises:
        PeerLost: the leader's books are not ours.
    """
    if len(header.keys) != len(header.segments):
        raise PeerLost("a micro-batch has more requests than segments, or fewer")
    for segment in header.segments:
        if segment.start < 0 or segment.count < 1 or len(segment.blocks) < blocks_for(segment.stop):
            raise PeerLost(
                f"a micro-batch has the segment [{segment.start}, {segment.stop}) in {len(segment.blocks)} blocks"
            )
        check_blocks(segment.blocks, num_blocks)


def check_blocks(blocks: Sequence[int], num_blocks: int) -> None:
    """Refuses blocks that a stage does not have.

    Raises:
        PeerLost: the leader names some.
    """
    if any(not 0 <= block < num_blocks for block in blocks):
        raise PeerLost("the leader names KV blocks that this stage does not have")
