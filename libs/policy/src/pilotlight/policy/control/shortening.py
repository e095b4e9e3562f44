"""Groups that become shorter pipelines, where no worker has room for the whole model (ParaServe,
section 6, for any number of workers that remain).

::

    placements      worker 1        worker 2     worker 3          worker 4
    ready           [0, 4)          [4, 8)       [8, 12)           [12, 16)
    consolidating   [0, 8) 0..4     [4, 8)       [8, 16) 8..12     [12, 16)
    ready           [0, 8)                       [8, 16)

The lead stays, and takes over what is behind it: requests are at it already. Everything is in the
row: ``remaining`` says which placements stay.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from pilotlight.policy.control.plan import GrowOrder, Room
from pilotlight.policy.cost import stage_room
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.plan import Instance, Placement

Run = Sequence[Placement]
"""Neighbours in a group; one of them is to have the layers of all."""


def plan_shorter(instance: Instance, model: Model, room: Room) -> GrowOrder | None:
    """The shortest pipeline that a group can become; None where it stays as it is.

    1. the fewest workers that have the room: parameters, and KV for as many tokens as the group has
       room for, since requests keep their blocks
    2. neighbours in the pipeline go together. The lead has its own layers and those behind it; of
       others the one that needs the least more than it has, and then the first
    3. of pipelines of one length the one whose largest stage is the smallest

    Args:
        instance: A group of which every stage is ready, the lead first.
        model: Its model.
        room: What workers have free beside what was granted to them.
    """
    places = instance.placements
    for size in range(2, len(places)):  # 1
        found = [kept for runs in _cut(places, size) if (kept := _kept(runs, places, model, room))]
        if not found:
            continue
        best = min(found, key=lambda kept: max(model.device_bytes(one.stage) for one in kept))  # 3
        longer = {one.worker_id: one for one in best}
        names = ", ".join(one.worker_id for one in best)
        return GrowOrder(
            instance_id=instance.instance_id,
            placements=tuple(longer.get(one.worker_id, one) for one in places),
            reason=f"its stages are ready, no worker has room for the whole model, and {names} have room for it together",
        )
    return None


def _cut(places: Run, size: int) -> Iterator[tuple[Run, ...]]:
    """All ways to make runs of a group; the lead's is longer than the lead."""
    for cuts in combinations(range(2, len(places)), size - 1):
        edges = (0, *cuts, len(places))
        yield tuple(places[start:stop] for start, stop in pairwise(edges))


def _kept(runs: Sequence[Run], places: Run, model: Model, room: Room) -> tuple[Placement, ...]:
    """Rule 2: the placements that remain; empty where some run has no worker with the room."""
    kept: list[Placement] = []
    for run in runs:
        stage = Stage(run[0].stage.start, run[-1].stage.stop)
        able = [
            (longer.device_bytes - one.device_bytes, one.stage.start, longer)
            for one in (run if kept else run[:1])
            if (longer := _with_room(one, stage, places, model, room)) is not None
        ]
        if not able:
            return ()
        kept.append(min(able, key=lambda one: one[:2])[2])
    return tuple(kept)


def _with_room(
    placement: Placement, stage: Stage, places: Run, model: Model, room: Room
) -> Placement | None:
    """A worker with a longer range; None where it has not the room."""
    if stage == placement.stage:
        return placement
    free_bytes, granule_bytes = room(placement.worker_id)
    needed = stage_room(model, stage, granule_bytes, kv_tokens=_kv_tokens(placement, places, model))
    if placement.device_bytes + free_bytes < needed.least_bytes:
        return None
    # No more: stages of a pipeline keep the blocks that they have.
    device_bytes = max(placement.device_bytes, needed.least_bytes)
    return replace(placement, stage=stage, device_bytes=device_bytes)


def _kv_tokens(placement: Placement, places: Run, model: Model) -> int:
    """Tokens whose blocks a worker must have room for, and no less: what the smallest stage has
    room for. A worker behind the lead knows of those before it alone.
    """
    at = places.index(placement)
    return min(
        (one.device_bytes - model.device_bytes(one.stage))
        // model.spec.kv_bytes_per_token(one.stage, model.dtype)
        for one in (places[: at + 1] if at else places)
    )
