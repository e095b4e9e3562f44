"""The table of a worker's held stages: what is held, in which state, and what was let go."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from pilotlight.common.errors import NotLoaded
from pilotlight.common.messages.engine import StepDone
from pilotlight.common.messages.hold import Hold
from pilotlight.policy.cluster import HeldStage, HeldState
from pilotlight.policy.ids import Generation, InstanceId
from pilotlight.policy.shown import NO_STEPS
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.held import Held, IdleTold, ServingStage
from pilotlight.worker.lifecycle import HeldEvent, step

RETRY_AFTER_S = 0.5
GONE_KEPT = 1024
"""Instances that were given up or drained and are remembered, so that a late command does not load
them again."""


class HeldTable:
    """The held stages of one worker by instance; ``Stages`` alone changes them."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._held: dict[InstanceId, Held] = {}
        self._gone: OrderedDict[InstanceId, Generation] = OrderedDict()

    def __iter__(self) -> Iterator[Held]:
        """What is held now; the table may change meanwhile."""
        return iter(tuple(self._held.values()))

    def __getitem__(self, instance_id: InstanceId) -> Held:
        return self._held[instance_id]

    def get(self, instance_id: InstanceId) -> Held | None:
        """The stage of an instance, if one is held."""
        return self._held.get(instance_id)

    @property
    def gone(self) -> Mapping[InstanceId, Generation]:
        """Instances that were given up or drained, with the generation that was."""
        return self._gone

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens for which the stages that serve have room, all together."""
        return sum(held.kv_capacity_tokens for held in self if held.state is HeldState.READY)

    @property
    def unproven(self) -> tuple[InstanceId, ...]:
        """Instances of which every part is in its place, and it has not been found yet that all of
        them were whole when they were copied. Asked for with every step.
        """
        return tuple(
            [
                one
                for one, held in self._held.items()
                # For most this says it all.
                if (held.grown is not None or held.state is HeldState.LOADING) and held.unproven
            ]
        )

    @property
    def busy(self) -> bool:
        """Some request waits for nothing but the engine."""
        return any(
            self._core.table.in_flight(held.hold.instance_id)
            for held in self
            if held.state is not HeldState.LOADING
        )

    def serving(self, instance_id: InstanceId) -> ServingStage:
        """The stage that takes an instance's requests: ready, or loading with room made for it.

        Raises:
            NotLoaded: it is not held, or the engine serves it not, or not yet.
        """
        held = self.get(instance_id)
        if held is None or not held.serves:
            state = held.state.value if held else "not held"
            raise NotLoaded(
                f"{instance_id} is {state} on {self._core.worker_id}, and not served",
                retry_after_s=RETRY_AFTER_S,
            )
        return ServingStage(hold=held.hold, kv_capacity_tokens=held.kv_capacity_tokens)

    def facts(self, now_s: float) -> tuple[HeldStage, ...]:
        """What is held, as it is reported."""
        table = self._core.table
        for one, held in self._held.items():
            held.steps = held.steps.at(now_s)
            in_flight = table.in_flight(one)
            if held.state is HeldState.READY and held.told_idle.is_due(now_s, in_flight):
                held.told_idle.tell(table.shares.idle_s(one, now_s), now_s, in_flight)
        return tuple(
            held.fact(now_s, table.in_flight(one), table.ended_s(one))
            for one, held in self._held.items()
        )

    def stepped(self, *steps: StepDone) -> None:
        """The engine ran batches: note what each decode step took, and a hop of a pipeline.

        A decode step gave one token to each request that ran, and ended none. It says nothing of
        one stage where others ran beside it: their requests ran, too.
        """
        for one in steps:
            held = self._held.get(one.turn_of) if one.turn_of is not None else None
            if held is None:
                continue
            if one.hop_s > 0:
                held.steps = held.steps.hopped(one.hop_s)
            elif 0 < one.batch_tokens == one.running == len(one.produced):
                held.steps = held.steps.decoded(one.running, one.kv_used_tokens, one.step_time_s)

    def overdue(self, now_s: float) -> tuple[InstanceId, ...]:
        """Instances that drain, and whose requests have had their time."""
        return tuple(
            instance_id
            for instance_id, held in self._held.items()
            if held.state is HeldState.DRAINING
            and held.overdue_s <= now_s
            and self._core.table.in_flight(instance_id) > 0
        )

    def add(self, hold: Hold) -> Held:
        """Begin to hold a stage."""
        state = step(None, HeldEvent.HOLD)
        assert state is not None
        now_s = self._core.clock.monotonic_s()
        held = Held(hold=hold, state=state, since_s=now_s, early=self._core.steps.overlap)
        self._held[hold.instance_id] = held
        self._core.table.shares.begin(hold.instance_id, held.since_s)
        self._core.room_changed.set()
        return held

    def rename(self, held: Held, hold: Hold) -> None:
        """A stage is another instance's from now on."""
        old_id = held.hold.instance_id
        del self._held[old_id]
        self._core.table.instance_gone(old_id)
        held.led_by = next(iter(held.hold.members), None)
        held.hold, held.since_s = hold, self._core.clock.monotonic_s()
        # What was told of the old instance stays that one's.
        self._core.table.shares.give_up(old_id, held.since_s)
        self._core.table.shares.keep(hold.instance_id, held.since_s)
        held.start_device_s, held.told_idle, held.steps = 0.0, IdleTold(), NO_STEPS
        self._held[hold.instance_id] = held
        self._core.changed.set()

    def move(self, held: Held, event: HeldEvent) -> None:
        """Take a stage through the table of states; one that has ended is held no longer."""
        state = step(held.state, event)
        held.since_s = self._core.clock.monotonic_s()
        instance_id = held.hold.instance_id
        shares = self._core.table.shares
        had_s = shares.end(instance_id, held.since_s)
        if event is HeldEvent.LOADED:
            held.start_device_s = had_s
            shares.keep(instance_id, held.since_s)
        elif held.state is HeldState.READY and state is not HeldState.READY:
            idle_s = shares.give_up(instance_id, held.since_s)
            held.told_idle.tell(idle_s, held.since_s, held.told_idle.in_flight)
        if state is None:
            del self._held[instance_id]
            self._core.table.instance_gone(instance_id)
        else:
            held.state = state
        self._core.changed.set()
        self._core.room_changed.set()

    def remember_gone(self, hold: Hold) -> None:
        """A command for this generation, or an older one, comes too late from now on."""
        self._gone[hold.instance_id] = hold.generation
        while len(self._gone) > GONE_KEPT:
            self._gone.popitem(last=False)
