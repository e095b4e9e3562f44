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

Where several stages remain (``shorter``), blocks of layers that another one takes over come the
same way, and go on to that one.
"""

from collections.abc import Sequence
from enum import Enum, auto

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.core.copies import BlockCopies
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.pipeline.frames import KvCopied, KvWanted, LeaderRuns, pack
from pilotlight.engine.pipeline.shorter import SEND_TIMEOUT_S, ShorterRing, fits, keep_copy
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage

COPY_BYTES = 8 << 20
"""Of one answer: a batch that comes behind it waits for no more than that."""
DEVICE_COPY_BYTES = 64 << 20
"""Of one that goes from device to device all the way, in less time: rounds of the ring are what
copying takes then."""


class GrowthState(Enum):
    """How far the leader has come; see the picture above."""

    PLACING = auto()
    COPYING = auto()
    SETTLING = auto()
    HANDING_OVER = auto()


SETTLING_AT_ONCE = 8
"""Questions that are under way while no batch is: the pause is one way round the ring, not one for
each layer. Fewer than a channel's window."""


class Growth:
    """The leader's side. One question is under way at a time while batches run.

    All travel in one order: answers come back in the order of the questions, and before
    ``LeaderRuns``, which follows the last one.
    """

    def __init__(
        self, resident: ResidentStage, target: Stage, ring: ShorterRing | None = None
    ) -> None:
        """Begins with the parts.

        Args:
            resident: the stage that leads; it has memory for the target.
            target: the range that it is to have.
            ring: of the stages that remain, where others do; all have their parts.
        """
        self._resident = resident
        self._target = target
        self.ring = ring
        self.state = GrowthState.PLACING
        moved = ring.moved if ring is not None else ()
        layers = (*range(resident.stage.stop, target.stop), *moved)
        self._copies = BlockCopies(layers)
        self._layers = iter(layers)
        """Those whose first round is to come."""
        self._layer = resident.stage.stop
        self._round: tuple[int, ...] = ()
        """What is left of the first round of a layer. What batches change meanwhile is no part of
        it."""
        self.asked = 0
        """Answers that are on their way."""
        self._at_most = self._blocks_of(COPY_BYTES)
        """Blocks of one answer."""

    @property
    def paused(self) -> bool:
        """No batch may be sent: what it would write is not copied any more."""
        return self.state in (GrowthState.SETTLING, GrowthState.HANDING_OVER)

    @property
    def due(self) -> bool:
        """``next_frame`` would give one."""
        if self.state is GrowthState.PLACING:
            return self._resident.parameters.complete
        if self.state is GrowthState.SETTLING:
            return self.asked < SETTLING_AT_ONCE
        return not self.waits

    @property
    def waits(self) -> bool:
        """An answer, or ``LeaderRuns``, is on its way."""
        return self.asked > 0 or self.state is GrowthState.HANDING_OVER

    @property
    def stop(self) -> int:
        """The stages behind run no layers before this one from the end on: none, where a shorter
        ring takes the place of theirs.
        """
        return self._target.stop if self.ring is None else self._resident.spec.num_layers

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
        self.state = GrowthState.HANDING_OVER
        return pack(LeaderRuns(stop=self.stop))

    def _blocks_of(self, num_bytes: int) -> int:
        spec = self._resident.spec
        per_block = 2 * BLOCK_TOKENS * spec.num_kv_heads * spec.head_dim
        return max(1, num_bytes // (per_block * self._resident.dtype.size_bytes))

    def _ask(self, layer: int, blocks: tuple[int, ...]) -> Frame:
        self._copies.take(layer, blocks)
        self.asked += 1
        return pack(KvWanted(layer=layer, blocks=blocks))

    def take_in(self, answer: KvCopied, frame: Frame) -> None:
        """Stores blocks that were asked for, or gives them to the stage whose they are to be.

        Raises:
            PeerLost: they were not, or do not fit.
        """
        resident, ring = self._resident, self.ring
        if not self.asked or answer.layer not in self._copies or not fits(resident, answer):
            raise PeerLost(f"KV blocks of layer {answer.layer} come that were not asked for")
        self.asked -= 1
        by_device = not isinstance(frame.payload, memoryview)
        self._at_most = self._blocks_of(DEVICE_COPY_BYTES if by_device else COPY_BYTES)
        if not keep_copy(resident, self._target, answer, frame):
            assert ring is not None, "without a ring all layers are the leader's"
            if not ring.forward.lost:  # The ring's next look says so.
                ring.forward.send(frame, SEND_TIMEOUT_S)
