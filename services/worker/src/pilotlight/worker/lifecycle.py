"""Life of a stage on its worker: a table of moves, and what a command asks of it.

Everything here is a pure function of what is held and what is desired. A stage that is not held has
no state (``None``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pilotlight.common.messages.hold import Hold
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Generation, InstanceId


class HeldEvent(StrEnum):
    """What can happen to a stage on its worker."""

    HOLD = "hold"
    """The scheduler desires it and there is room: the load begins."""
    LOADED = "loaded"
    """Every part is in its place."""
    GROW = "grow"
    """It has a longer range from now on; it served its old one meanwhile."""
    FAIL = "fail"
    """A part cannot be had or placed, or the engine ended."""
    LET_GO = "let_go"
    """The scheduler does not desire it any more, or wants it drained."""
    UNLOADED = "unloaded"
    """Its memory is free."""
    GIVE_UP = "give_up"
    """The cache needs its room, and it is idle."""


class IllegalMove(ValueError):
    """An event that the table does not allow in the state."""


_S = HeldState
_E = HeldEvent

TRANSITIONS: dict[tuple[HeldState | None, HeldEvent], HeldState | None] = {
    (None, _E.HOLD): _S.LOADING,
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.READY, _E.GROW): _S.READY,
    (_S.LOADING, _E.FAIL): _S.FAILED,
    (_S.READY, _E.FAIL): _S.FAILED,
    (_S.LOADING, _E.LET_GO): _S.DRAINING,
    (_S.READY, _E.LET_GO): _S.DRAINING,
    (_S.DRAINING, _E.UNLOADED): None,
    (_S.READY, _E.GIVE_UP): _S.EVICTED,
    (_S.FAILED, _E.LET_GO): None,
    (_S.EVICTED, _E.LET_GO): None,
}

RESIDENT = frozenset({_S.LOADING, _S.READY, _S.DRAINING})
"""Takes device memory."""


def step(state: HeldState | None, event: HeldEvent) -> HeldState | None:
    """The state after an event.

    Raises:
        IllegalMove: the table has no such move.
    """
    if (state, event) not in TRANSITIONS:
        raise IllegalMove(
            f"a stage that is {state.value if state else 'not held'} cannot take {event.value}"
        )
    return TRANSITIONS[state, event]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldView:
    """What a plan looks at of one held stage."""

    hold: Hold
    state: HeldState
    growing: Hold | None = None
    """The longer range that it is being given."""

    @property
    def device_bytes(self) -> int:
        """What it takes, or is about to."""
        growing_bytes = self.growing.device_bytes if self.growing is not None else 0
        return max(self.hold.device_bytes, growing_bytes) if self.state in RESIDENT else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldPlan:
    """What to do so that what is held becomes what is desired.

    Every instance is named at most once.
    """

    start: tuple[Hold, ...] = ()
    """Load these now."""
    later: tuple[Hold, ...] = ()
    """No room yet, but something is on its way out: plan again when its memory is free."""
    refuse: tuple[Hold, ...] = ()
    """No room, and nothing leaves: these fail."""
    renew: tuple[Hold, ...] = ()
    """Held as desired under an older generation: only the number changes."""
    grow: tuple[Hold, ...] = ()
    """Held and ready, and desired with its own layers and more: it gets them while it serves."""
    rename: tuple[Hold, ...] = ()
    """Made of stages that are held under other names: these are theirs from now on."""
    let_go: tuple[InstanceId, ...] = ()
    """Not desired (as it is held), or to be drained."""


def plan(
    held: Mapping[InstanceId, HeldView],
    gone: Mapping[InstanceId, Generation],
    desired: Iterable[Hold],
    device_bytes: int,
) -> HoldPlan:
    """Compare what is held with the complete desired set.

    1. Held and not desired: let go.
    2. Desired at an older generation than is held: the command is older than what is known;
       nothing.
    3. Desired to drain: let go, if it takes or will take requests.
    4. Held as desired at this generation, in whatever state: nothing, unless more is known of its
       group: then it is renewed. So one that failed or was evicted is not loaded again.
    5. Held with the same stage at an older generation, and resident: renewed. Ready, and desired
       with its own layers and more: grown in place, if what that takes more fits beside what is
       resident; else the next command asks again. So it does while the stage still loads. One that
       failed or was evicted under the older generation, or whose stage changes otherwise, is let go
       first and started when it is gone.
    6. Not held, and given up or drained at this generation or a later one (``gone``): nothing.
    7. Not held, but made of what is held, ready, with the same layers and not desired itself: that
       is renamed. So is nothing else of it: what it is made of is let go, and it is loaded anew.
    8. Not held: started if it fits beside what is resident, in the order of the command; else
       later, if something leaves.

    Args:
        held: What is held.
        gone: What was given up or drained, with its generation.
        desired: The last command's holds.
        device_bytes: What the device has for stages.
    """
    wanted = {hold.instance_id: hold for hold in desired}
    rename = tuple(
        hold
        for name, hold in wanted.items()
        if name not in held and _is_renamed(hold, held, wanted)
    )  # 7
    kept = {hold.grown_from for hold in rename}
    let_go = [
        instance_id
        for instance_id, view in held.items()
        if instance_id not in wanted and instance_id not in kept and view.state is not _S.DRAINING
    ]  # 1
    renew: list[Hold] = []
    longer: list[Hold] = []
    missing: list[Hold] = []
    returning: list[Hold] = []
    for instance_id, hold in wanted.items():
        view = held.get(instance_id)
        if view is None:  # 6; rule 8 is in _with_room
            if hold in rename:
                continue
            if not hold.draining and gone.get(instance_id, -1) < hold.generation:
                missing.append(hold)
        elif view.state is _S.DRAINING:  # 5, when it is gone
            if not hold.draining and hold.generation > view.hold.generation:
                returning.append(hold)
        elif hold.generation < view.hold.generation:  # 2
            continue
        elif hold.draining:  # 3
            if view.state in RESIDENT:
                let_go.append(instance_id)
        elif hold.generation > view.hold.generation:  # 5
            if view.state in RESIDENT and _same_stage(hold, view.hold):
                renew.append(hold)
            elif view.state in RESIDENT and _longer(hold, view.hold):
                if view.state is _S.READY and view.growing is None:
                    longer.append(hold)
            else:
                let_go.append(instance_id)
                returning.append(hold)
        elif (
            view.state in RESIDENT
            and _same_stage(hold, view.hold)
            and hold.members != view.hold.members
        ):  # 4
            renew.append(hold)
    so_far = HoldPlan(renew=tuple(renew), grow=tuple(longer), rename=rename, let_go=tuple(let_go))
    return _with_room(held, so_far, missing, tuple(returning), device_bytes)


def drain_of(desired: Iterable[Hold], instance_id: InstanceId) -> Hold | None:
    """A command's word that a stage is to drain; None: it does not say so."""
    drains = (hold for hold in desired if hold.draining and hold.instance_id == instance_id)
    return next(drains, None)


def _with_room(
    held: Mapping[InstanceId, HeldView],
    so_far: HoldPlan,
    missing: list[Hold],
    returning: tuple[Hold, ...],
    device_bytes: int,
) -> HoldPlan:
    """Rules 5 and 8: what fits beside everything that still takes memory, the leaving included.

    What grows comes first.
    """
    free_bytes = device_bytes - sum(view.device_bytes for view in held.values())
    grow: list[Hold] = []
    for hold in so_far.grow:
        more_bytes = max(0, hold.device_bytes - held[hold.instance_id].device_bytes)
        if more_bytes <= free_bytes:
            free_bytes -= more_bytes
            grow.append(hold)
    leaving = any(view.state is _S.DRAINING for view in held.values()) or any(
        held[instance_id].state in RESIDENT for instance_id in so_far.let_go
    )
    start: list[Hold] = []
    short: list[Hold] = []
    for hold in missing:
        if hold.device_bytes <= free_bytes:
            free_bytes -= hold.device_bytes
            start.append(hold)
        else:
            short.append(hold)
    later, refuse = (tuple(short), ()) if leaving else ((), tuple(short))
    return HoldPlan(
        start=tuple(start),
        later=later + returning,
        refuse=refuse,
        renew=so_far.renew,
        grow=tuple(grow),
        rename=so_far.rename,
        let_go=so_far.let_go,
    )


def _is_renamed(
    hold: Hold, held: Mapping[InstanceId, HeldView], wanted: Mapping[InstanceId, Hold]
) -> bool:
    """Rule 7."""
    if hold.grown_from is None or hold.grown_from in wanted or hold.draining:
        return False
    view = held.get(hold.grown_from)
    return (
        view is not None
        and view.state is _S.READY
        and view.growing is None
        and _same_stage(hold, view.hold)
    )


def _same_stage(one: Hold, other: Hold) -> bool:
    return (one.stage, one.model.digest, one.model.dtype) == (
        other.stage,
        other.model.digest,
        other.model.dtype,
    )


def _longer(one: Hold, other: Hold) -> bool:
    """One has the other's layers and more, at either end."""
    same = (one.model.digest, one.model.dtype) == (other.model.digest, other.model.dtype)
    return same and one.stage != other.stage and other.stage.is_within(one.stage)
