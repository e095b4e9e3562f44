"""What a worker knows of one stage that it holds."""

import asyncio
import math
from dataclasses import dataclass, field

from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.engine import StageLoaded
from pilotlight.common.messages.hold import Hold
from pilotlight.common.messages.pipelines import KvAt, StageGrown
from pilotlight.policy.cluster import HeldStage, HeldState, Member
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Moment
from pilotlight.policy.shown import NO_STEPS, StepsSeen
from pilotlight.worker.lifecycle import HeldView

IDLE_TOLD_EVERY_S = 60.0
"""What a worker that dies has not told of its idle time is less than this."""


@dataclass(slots=True, kw_only=True)
class StageLoan:
    """KV of a stage beyond its grant; ``Lending`` alone writes it."""

    offered_bytes: int = 0
    """What the cache lends it."""
    lent_bytes: int = 0
    """What it has, or is about to have."""
    unready_bytes: int = 0
    """As much of it gives no room before other layers have theirs."""
    granted_tokens: int = 0
    """Of its KV, what its grant holds; 0: it has none yet."""
    begun: bool = False
    """It has given its first token."""
    reaching: list[int] = field(default_factory=list[int])
    """Tokens that single requests could reach which wait to be taken for that."""
    reached_tokens: int = 0
    """The most that one in flight could."""
    pressed_tokens: int = 0
    """What is wanted at least, since requests wait in the engine."""
    refused_until_s: float = 0.0
    """The engine has refused to resize it: it is not asked again before."""


@dataclass(slots=True, kw_only=True)
class IdleTold:
    """What is told of a stage's idle time: it grows all the time, and is told anew when something
    else is, or after a while. Else no two reports were the same.
    """

    device_s: float = 0.0
    at_s: float = -math.inf
    in_flight: int = 0

    def is_due(self, now_s: float, in_flight: int) -> bool:
        """Whether it is to be told anew."""
        return in_flight != self.in_flight or now_s - self.at_s >= IDLE_TOLD_EVERY_S

    def tell(self, device_s: float, now_s: float, in_flight: int) -> None:
        """Tell this from now on."""
        self.device_s, self.at_s, self.in_flight = device_s, now_s, in_flight


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """One stage; ``Stages`` alone writes it, but for its loan, and what that makes of its KV."""

    hold: Hold
    state: HeldState
    since_s: float
    reason: str = ""
    kv_capacity_tokens: int = 0
    open: bool = False
    """The engine has said that it takes requests."""
    early: bool = True
    """It may take requests while it loads."""
    placed: Moment | None = None
    """When its last part was in its place."""
    loading: asyncio.Task[None] | None = None
    loaded: asyncio.Future[StageLoaded] | None = None
    """What the engine says of the load."""
    growing: Hold | None = None
    """The longer range that it is being given."""
    grown: asyncio.Future[StageGrown] | None = None
    """What the engine says of that."""
    led_by: Member | None = None
    """The worker that led the group of which it was a stage, as it is another instance's now."""
    renaming: Hold | None = None
    """The instance whose it is to be, while the engine is asked for that."""
    overdue_s: float = math.inf
    """When its requests are to go on elsewhere, if it drains."""
    unloaded: asyncio.Future[None] | None = None
    """Done when the engine has freed it; set while that is asked."""
    lost: bool = False
    """Its engine died."""
    joined: bool = False
    """It is one of a pipeline."""
    behind: bool = False
    """In its last pipeline another stage led, whatever it has grown to since."""
    loan: StageLoan = field(default_factory=StageLoan)
    start_device_s: float = 0.0
    """What its load had of the device, once it is over."""
    told_idle: IdleTold = field(default_factory=IdleTold)
    steps: StepsSeen = NO_STEPS
    """What its steps took, since that was told last."""

    @property
    def serves(self) -> bool:
        """It takes requests.

        The engine says whether it can: of a whole model, or of a stage that leads a pipeline.
        """
        loads = self.state is HeldState.LOADING and self.early
        return self.open and (loads or self.state is HeldState.READY)

    @property
    def follows(self) -> bool:
        """Another stage of its pipeline has the requests, and may want it for them."""
        return self.joined and self.behind

    def join(self) -> None:
        """It is one of a pipeline from now on."""
        self.joined, self.behind = True, self.hold.stage.start > 0

    def renew(self, hold: Hold) -> None:
        """It is held as before, and more is known of its group.

        Where a worker has come into that, a stage of it was lost: nothing is served before all are
        joined again, whatever the engine knows of that yet.
        """
        before = {member.worker_id for member in self.hold.members}
        if any(member.worker_id not in before for member in hold.members):
            self.open = False
        self.hold = hold

    def has_kv(self, kv_capacity_tokens: int) -> None:
        """The engine says for how many tokens its grant has room; nothing new, where more is lent
        already.
        """
        if not self.loan.lent_bytes:
            self.kv_capacity_tokens = self.loan.granted_tokens = kv_capacity_tokens

    @property
    def idle(self) -> bool:
        """Nothing is being done to it: if no request is on it, it may go."""
        return self.state is HeldState.READY and self.growing is None and self.renaming is None

    def kv_at(self, moved_from: InstanceId | None) -> KvAt | None:
        """Where KV of a request may be that ran at another instance before: with the engine that
        led this stage's group. None: nowhere that is known.
        """
        lead = self.led_by
        if moved_from is None or moved_from != self.hold.grown_from or not (lead and lead.port):
            return None
        return KvAt(instance_id=moved_from, node_id=lead.node_id, host=lead.host, port=lead.port)

    @property
    def unproven(self) -> bool:
        """The engine has every part in place, and it has not been found yet that all of them were
        whole when they were copied.
        """
        if self.state is HeldState.LOADING:
            return self.loaded is not None and self.loaded.done()
        if (grown := self.grown) is None:
            return False
        return grown.done() and not grown.cancelled() and grown.exception() is None

    def hear_grown(self, event: StageGrown | PilotlightError) -> None:
        """What the engine says of its longer range, or why there is none; nothing, if it does not
        grow.
        """
        if self.grown is None or self.grown.done():
            return
        if isinstance(event, PilotlightError):
            self.grown.set_exception(event)
        else:
            self.grown.set_result(event)

    @property
    def view(self) -> HeldView:
        """What a plan looks at."""
        return HeldView(hold=self.hold, state=self.state, growing=self.growing)

    def fact(self, now_s: float, in_flight: int, ended_s: float | None) -> HeldStage:
        """As it is reported.

        Args:
            now_s: the worker's monotonic clock.
            in_flight: requests on it.
            ended_s: when the last one ended.
        """
        hold = self.hold
        idle = self.idle and in_flight == 0
        return HeldStage(
            instance_id=hold.instance_id,
            generation=hold.generation,
            model=hold.model.name,
            digest=hold.model.digest,
            stage=hold.stage,
            state=self.state,
            device_bytes=self.view.device_bytes,
            in_flight=in_flight,
            idle_s=now_s - max(self.since_s, ended_s or 0.0) if idle else 0.0,
            reason=self.reason,
            kv_capacity_tokens=self.kv_capacity_tokens,
            loaded=self.placed,
            open=self.serves and (self.state is HeldState.LOADING or bool(hold.members)),
            start_device_s=self.start_device_s,
            idle_device_s=self.told_idle.device_s,
            times=self.steps.told,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStage:
    """A stage that takes requests."""

    hold: Hold
    kv_capacity_tokens: int


def placed_at(loaded: StageLoaded) -> Moment | None:
    """The end of the engine's last work on it."""
    last = max(loaded.phases, key=lambda phase: phase.end_s, default=None)
    return Moment(at_s=last.end_s, wall_offset_s=last.wall_offset_s) if last is not None else None
