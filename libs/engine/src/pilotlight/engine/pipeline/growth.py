"""How the leading stage of a pipeline takes layers over from the stages behind it, while requests
run.

::

    PLACING      parts of the new layers come in                  batches run as before
    COPYING      KV blocks of the new layers, layer by layer      batches run as before
    SETTLING     the blocks that batches have written meanwhile   no new batch
    HANDING_OVER the other stages learn that the leader runs them no new batch
    (end)        the leader runs the longer range

This is the consolidation of ParaServe (section 6: the KV of the other stages moves to one worker),
with one difference: blocks move while the pipeline decodes, and it pauses for the last ones alone.
"""

from collections.abc import Sequence
from enum import Enum, auto

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.core.copies import BlockCopies
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.pipeline.frames import KvCopied, KvWanted, LeaderRuns, pack, tensor_of
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage

COPY_BYTES = 8 << 20
"""Of one answer: a batch that comes behind it waits for no more than that."""


class GrowthState(Enum):
    """How far the leader has come; see the picture above."""

    PLACING = auto()
    COPYING = auto()
    SETTLING = auto()
    HANDING_OVER = auto()


class Growth:
    """The leader's side. One question is under way at a time."""

    def __init__(self, resident: ResidentStage, target: Stage) -> None:
        """Begins with the parts.

        Args:
            resident: the stage that leads; it has memory for the target.
            target: the range that it is to have.
        """
        self._resident = resident
        self.target = target
        self.state = GrowthState.PLACING
        new = Stage(resident.stage.stop, target.stop)
        self._copies = BlockCopies(new)
        self._layers = iter(range(new.start, new.stop))
        """Those whose first round is to come."""
        self._layer = new.start
        self._round: tuple[int, ...] = ()
        """What is left of the first round of a layer. What batches change meanwhile is no part of
        it."""
        self._asked = False
        per_block = 2 * BLOCK_TOKENS * resident.spec.num_kv_heads * resident.spec.head_dim
        self._at_most = max(1, COPY_BYTES // (per_block * resident.dtype.size_bytes))

    @property
    def paused(self) -> bool:
        """No batch may be sent: what it would write is not copied any more."""
        return self.state in (GrowthState.SETTLING, GrowthState.HANDING_OVER)

    @property
    def due(self) -> bool:
        """``next_frame`` would give one."""
        if self.state is GrowthState.PLACING:
            return self._resident.parameters.complete
        return not self._asked

    @property
    def waits(self) -> bool:
        """An answer is on its way."""
        return self._asked

    def wrote(self, segments: Sequence[Segment]) -> None:
        """A batch is sent that writes these."""
        for segment in segments:
            first, stop = segment.start // BLOCK_TOKENS, blocks_for(segment.stop)
            self._copies.wrote(segment.blocks[first:stop])

    def next_frame(self) -> Frame | None:
        """What goes to the stages behind now, if anything."""
        if not self.due:
            return None
        filled = self._resident.scheduler.filled_blocks
        if self.state is GrowthState.PLACING:
            self.state = GrowthState.COPYING
        while self.state is GrowthState.COPYING:
            if self._round:
                blocks, self._round = self._round[: self._at_most], self._round[self._at_most :]
                return self._ask(self._layer, blocks)
            following = next(self._layers, None)
            if following is None:
                self.state = GrowthState.SETTLING
            else:
                self._layer = following
                self._round = self._copies.missing(following, filled)
        if wanted := self._copies.next_of(filled, self._at_most):
            return self._ask(*wanted)
        # Cached blocks that have no owner are not copied. What gets no owner from now on, is.
        self._resident.scheduler.forget_cached()
        self.state, self._asked = GrowthState.HANDING_OVER, True
        return pack(LeaderRuns(stop=self.target.stop))

    def _ask(self, layer: int, blocks: tuple[int, ...]) -> Frame:
        self._copies.take(layer, blocks)
        self._asked = True
        return pack(KvWanted(layer=layer, blocks=blocks))

    def take_in(self, answer: KvCopied, frame: Frame) -> None:
        """Stores blocks that were asked for.

        Raises:
            PeerLost: they were not, or do not fit.
        """
        spec, resident = self._resident.spec, self._resident
        shape = (1, 2, len(answer.blocks) * BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        within = resident.stage.stop <= answer.layer < self.target.stop
        known = all(0 <= block < resident.num_blocks for block in answer.blocks)
        fits = answer.tensor.shape == shape and answer.tensor.dtype is resident.dtype
        if (
            not (self._asked and within and known and fits)
            or self.state is GrowthState.HANDING_OVER
        ):
            raise PeerLost(f"KV blocks of layer {answer.layer} come that were not asked for")
        self._asked = False
        layers = Stage(answer.layer, answer.layer + 1)
        resident.kv.write(layers, answer.blocks, 0, tensor_of(frame, answer.tensor))
