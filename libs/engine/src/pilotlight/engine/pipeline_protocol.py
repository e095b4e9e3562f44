"""What a stage asks of the pipeline that it is in, and what one step of a stage gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.channel.channel import Channel
from pilotlight.engine.core.batch import Plan, Segment
from pilotlight.engine.errors import EngineError
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.results import FirstPrefill
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """What one forward pass of a stage gave."""

    plan: Plan | None = None
    """What it ran; None if it only waited for another stage."""
    produced: tuple[Produced, ...] = ()
    first_prefill: FirstPrefill | None = None
    lost: EngineError | None = None
    """Why the stage belongs to no pipeline any more."""
    left: bool = False
    """The stage belongs to no pipeline any more: all of its layers were taken over."""
    grown: bool = False
    """The stage leads, and runs its longer range from now on."""
    hop_s: float = 0.0
    """As in ``StepDone``."""
    began_s: float | None = None
    """Since when the device ran the batch, on the engine's clock; None: since the step began."""
    unformed: EngineError | None = None
    """Why no shorter pipeline forms; this one goes on."""


class Pipeline(Protocol):
    """A stage's place between others, once it has one."""

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests of another stage's books that have KV here."""
        ...

    @property
    def waits(self) -> bool:
        """Its requests wait for parts of other stages: a step does nothing for them."""
        ...

    @property
    def leads(self) -> bool:
        """All stages are connected, and this one takes the requests."""
        ...

    @property
    def awaits_others(self) -> bool:
        """The stage leads, and others of a shorter pipeline have not their parts yet."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks that its micro-batches may use at most."""
        ...

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Those by which something may come or has to leave."""
        ...

    def step(self, monotonic_s: Callable[[], float], *, may_wait: bool) -> StageStep:
        """Does what can be done now; with ``may_wait``, looks out for a moment for what comes
        next.
        """
        ...

    def placed(self, key: RequestKey) -> Segment | None:
        """What this stage has of a request."""
        ...

    def forward(self, segment: Segment, pieces: Sequence[KvPiece]) -> None:
        """Sends the KV of a request that moved here to the stages behind.

        Raises:
            PeerLost: that cannot be done.
        """
        ...

    def grow(self, stage: Stage | None) -> None:
        """The stage gets this range; None: it does not, after all.

        One that leads takes the layers over from the stages behind. One that follows goes on as
        before until the pipeline ends. A place in a shorter pipeline is given up.
        """
        ...

    def shorten(self, stage: Stage, before: Channel, behind: Channel) -> None:
        """The stage has a place in the ring of a shorter pipeline, which takes the place of this
        one when all of its stages have their parts (``pipeline.shorter``). One that was made before
        is given up.

        Raises:
            BadRequest: it is taking its place at this moment.
        """
        ...

    def close(self) -> None:
        """Lets go of the channels."""
        ...
