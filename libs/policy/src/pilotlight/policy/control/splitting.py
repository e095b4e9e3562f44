"""What comes of a group while it consolidates: the lead alone, and instances of the others
(ParaServe, section 6: scaling up).

::

    placements      lead             worker 2          worker 3
    ready           [0, 4)           [4, 8)            [8, 12)
    consolidating   [0, 12) 0..4     [0, 12) 4..8      [8, 12)      2 targets
    the lead grown  [0, 12) 0..12    [0, 12) 4..8                   worker 3 is let go
    worker 2, too   [0, 12)          an instance of its own

Everything is in the rows: a placement with the whole model is a target, ``Placement.held`` is what
its worker has of it, a lead that has everything is alone. Another leader goes on from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pilotlight.policy.cluster import HeldStage, HeldState
from pilotlight.policy.ids import Epoch, Generation, InstanceId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.remaining import remaining


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A group of which some worker has the whole model, or fewer workers have it together."""

    stays: tuple[Placement, ...]
    """That worker, or these: the instance from now on. ``held`` of one worker is the whole
    model."""
    pending: tuple[Placement, ...] = ()
    """Others that are to have it, and do not yet."""
    become: tuple[Placement, ...] = ()
    """Others that have it: each is an instance of its own from now on."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of the group from now on."""
        return (*self.stays, *self.pending)

    @property
    def targets(self) -> int:
        """Of the group from now on; those that it has become count for themselves."""
        return 1 + len(self.pending)


def taker_of(instance: Instance) -> Placement | None:
    """The worker that is to have all layers, the first one if there are several; None where no
    worker is.
    """
    for one in instance.placements:
        if len(instance.placements) > 1 and all(
            other.stage.is_within(one.stage) for other in instance.placements
        ):
            return one
    return None


def settled(instance: Instance, held: Mapping[WorkerId, HeldStage]) -> Settled | None:
    """How far a group that consolidates has come; None while no worker has the whole model, and no
    shorter pipeline runs.

    1. the taker has it: its worker says so, or said so before
    2. what was to stay a part of the model is let go
    3. a worker that has the whole model, too, is an instance of its own, as long as targets are
       left
    4. one that does not yet is waited for, as long as targets are left; not one that has lost or
       dropped its stage
    5. a shorter pipeline runs when each worker that remains says that it has its range: the lead
       says so last. What the others had is let go

    Args:
        instance: The group.
        held: What live workers say of their stages.
    """
    taker = taker_of(instance)
    if taker is None:
        return _shorter(instance, held)  # 5
    whole, said = taker.stage, held.get(taker.worker_id)
    ready = said is not None and said.state is HeldState.READY and said.stage == whole
    new = said is not None and said.generation >= instance.generation
    if taker.held != whole and not (ready and new):  # 1
        return None
    others = [
        one
        for one in instance.placements
        if one is not taker
        and one.stage == whole
        and (there := held.get(one.worker_id)) is not None
        and there.state is HeldState.READY
    ]  # 2, 4
    left = instance.targets - 1
    become = [one for one in others if held[one.worker_id].stage == whole][: max(0, left)]  # 3
    pending = [one for one in others if held[one.worker_id].stage != whole]
    return Settled(
        stays=(replace(taker, held=whole),),
        become=tuple(become),
        pending=tuple(pending[: max(0, left - len(become))]),
    )


def _shorter(instance: Instance, held: Mapping[WorkerId, HeldStage]) -> Settled | None:
    """Rule 5."""
    kept = remaining([one.stage for one in instance.placements])
    stays = tuple(instance.placements[at] for at in kept)
    for one in stays:
        said = held.get(one.worker_id)
        if (
            said is None
            or said.state is not HeldState.READY
            or said.stage != one.stage
            or said.generation < instance.generation
        ):
            return None
    return Settled(stays=stays) if stays else None


def instances_of(
    before: Instance, become: tuple[Placement, ...], epoch: Epoch, now_s: float
) -> tuple[Instance, ...]:
    """Instances that workers of a group have become. Their names follow from the group's, so that a
    log replays.

    Args:
        before: The group.
        become: Its workers that have the whole model.
        epoch: Of the leader that decides.
        now_s: The moment, monotonic.
    """
    return tuple(
        Instance(
            instance_id=InstanceId(f"{before.instance_id}-{_first(one).start}"),
            model=before.model,
            digest=before.digest,
            # Its worker has to hear of it, and to say so; there is nothing to fetch.
            state=InstanceState.FETCHING,
            generation=Generation(1),
            epoch=epoch,
            placements=(
                replace(
                    one,
                    held=one.stage,
                    grown_from=before.instance_id,
                    grant_id=None,
                    upstreams=(),
                    source="",
                    fetch_bytes=0,
                    fetch_deadline_s=None,
                ),
            ),
            decision_id=before.decision_id,
            state_since_s=now_s,
            last_used_s=now_s,
            reason=f"its worker has the whole model, as a stage of {before.instance_id}",
            served=True,
            load_s=before.load_s,
        )
        for one in become
    )


def _first(placement: Placement) -> Stage:
    """What the worker had when the group began."""
    return placement.held or placement.stage
