"""The ring of the stages that remain when a pipeline becomes a shorter one, made beside the ring
that runs.

::

    runs      0 ──> 1 ──> 2 ──> 3 ──> 0      [0, 4) [4, 8) [8, 12) [12, 16)
    is made   0 ────────> 2 ────────> 0      [0, 8)        [8, 16)

    forming   each stage that remains gets the parts of its longer range; stage 0 says hello when it
              has its own, and each other one answers when it has its own, and they were whole
    growth    KV of layers that move comes to stage 0 by the ring that runs; what is another stage's
              goes on to that by the new one (``growth``)
    the end   "the leader runs all layers" has gone round: nothing is under way in the old ring.
              Stage 0 goes on in the new one, where it introduces all requests again, and hangs the
              old one up: the stages whose layers were taken leave

For the stages that go it is what a lead does that takes everything over.
"""

from pilotlight.engine.channel.channel import Channel, Frame
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.pipeline.frames import (
    KvCopied,
    StageHello,
    StagesUp,
    pack,
    tensor_of,
    unpack,
)
from pilotlight.engine.pipeline.meeting import blocks_of, hello_of
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage

SEND_TIMEOUT_S = 5.0
"""A stage of the new ring has nothing to do in it but to take these frames."""


class ShorterRing:
    """The side of the stage that leads, until it goes on in the ring."""

    def __init__(
        self, resident: ResidentStage, stage: Stage, answers: Channel, forward: Channel
    ) -> None:
        """Says nothing yet.

        Args:
            resident: stage 0.
            stage: its range in the ring; parts and memory may be missing.
            answers: from the ring's last stage.
            forward: to its next one.
        """
        self._resident = resident
        self.stage = stage
        self.answers = answers
        self.forward = forward
        self.stages: tuple[StageHello, ...] = ()
        """Once all have answered."""
        self.num_blocks = 0
        self._greeted = False

    @property
    def channels(self) -> tuple[Channel, Channel]:
        """Of the ring."""
        return self.answers, self.forward

    @property
    def due(self) -> bool:
        """The hello can be said."""
        return not self._greeted and _has_parts(self._resident, self.stage)

    @property
    def moved(self) -> tuple[int, ...]:
        """Layers whose KV goes to other stages of the ring."""
        return tuple(
            layer
            for hello in self.stages[1:]
            for layer in range(hello.stage.start, hello.stage.stop)
            if hello.held is not None and not hello.held.start <= layer < hello.held.stop
        )

    def look(self) -> bool:
        """Goes on with what can be done; True when the last answer has just come.

        Raises:
            PeerLost: a stage of the ring is gone, or they are not one model.
        """
        if self.due:
            hello = hello_of(self._resident, self.stage)
            self.forward.send(pack(StagesUp(stages=(hello,))), SEND_TIMEOUT_S)
            self._greeted = True
        if self.forward.readable:
            self.forward.receive(0)
            raise PeerLost("the next stage of a shorter pipeline sent a frame backwards")
        if not self.answers.readable:
            return False
        answer = unpack(self.answers.receive(0))
        if not isinstance(answer, StagesUp) or not self._greeted or self.stages:
            raise PeerLost(f"a stage of a shorter pipeline sent {type(answer).__name__}")
        self.num_blocks = blocks_of(self._resident, answer.stages)
        used_blocks = self._resident.scheduler.kv_capacity_tokens // BLOCK_TOKENS
        if self.num_blocks < used_blocks:
            raise PeerLost(
                f"a stage of a shorter pipeline has {self.num_blocks} KV blocks, {used_blocks} are used"
            )
        self.stages = answer.stages
        return True

    def close(self) -> None:
        """Lets go of its channels."""
        for channel in self.channels:
            channel.close()


class NextPlace:
    """The side of a stage that follows, until the ring that runs is over."""

    def __init__(
        self, resident: ResidentStage, stage: Stage, before: Channel, behind: Channel
    ) -> None:
        """Answers nothing yet.

        Args:
            resident: the stage.
            stage: its range in the ring.
            before: from the ring's stage before.
            behind: to the next one.
        """
        self._resident = resident
        self._stage = stage
        self.before = before
        self.behind = behind
        self._hello: StagesUp | None = None
        """What the stages before said, while this one has not its parts."""
        self.answered = False

    @property
    def channels(self) -> tuple[Channel, Channel]:
        """Of the ring."""
        return self.before, self.behind

    @property
    def due(self) -> bool:
        """The stages before wait for an answer, and it can be given."""
        resident = self._resident
        whole = resident.vouched if resident.target is None else resident.target_vouched
        return self._hello is not None and whole and _has_parts(resident, self._stage)

    def look(self) -> None:
        """Goes on with what can be done.

        Raises:
            PeerLost: a stage of the ring is gone, or says what it should not.
        """
        if self._hello is not None and self.due:
            mine = hello_of(self._resident, self._stage)
            up = StagesUp(stages=(*self._hello.stages, mine))
            self.behind.send(pack(up), SEND_TIMEOUT_S)
            self._hello, self.answered = None, True
        if self.behind.readable:
            self.behind.receive(0)
            raise PeerLost("the next stage of a shorter pipeline sent a frame backwards")
        if not self.before.readable:
            return
        frame = self.before.receive(0)
        match header := unpack(frame):
            case StagesUp() if not self.answered:
                self._hello = header
            case KvCopied() if self.answered:
                if not keep_copy(self._resident, self._stage, header, frame):
                    self.behind.send(frame, SEND_TIMEOUT_S)
            case _:
                raise PeerLost(f"{type(header).__name__} comes before a shorter pipeline runs")

    def close(self) -> None:
        """Lets go of its channels."""
        for channel in self.channels:
            channel.close()


def keep_copy(resident: ResidentStage, layers: Stage, copied: KvCopied, frame: Frame) -> bool:
    """Stores blocks of a layer that a stage has taken over; False where the layer is another's.

    Args:
        resident: the stage.
        layers: that it runs, or is about to.
        copied: what comes.
        frame: with it.

    Raises:
        PeerLost: they do not fit.
    """
    if not layers.start <= copied.layer < layers.stop:
        return False
    if not fits(resident, copied):
        raise PeerLost(f"KV blocks of layer {copied.layer} come that do not fit")
    layer = Stage(copied.layer, copied.layer + 1)
    resident.kv.write(layer, copied.blocks, 0, tensor_of(frame, copied.tensor))
    return True


def fits(resident: ResidentStage, copied: KvCopied) -> bool:
    """Whether blocks are of a stage's model, and are there."""
    spec = resident.spec
    shape = (1, 2, len(copied.blocks) * BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
    known = all(0 <= block < resident.num_blocks for block in copied.blocks)
    return known and copied.tensor.shape == shape and copied.tensor.dtype is resident.dtype


def _has_parts(resident: ResidentStage, stage: Stage) -> bool:
    """All parts of a range are in place."""
    return (resident.target or resident.stage) == stage and resident.parameters.complete
