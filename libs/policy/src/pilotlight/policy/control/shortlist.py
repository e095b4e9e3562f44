"""Which workers can be the answer of a placement: the policies look at these, and answer as if they
had looked at all.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import partial

from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.making_way import making_way
from pilotlight.policy.control.rooms import Exact
from pilotlight.policy.control.shapes import Shape
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import CONSIDERED
from pilotlight.policy.placement import PlacementRules
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import Demand
from pilotlight.policy.turns import TurnRules

NEAREST = 4
"""Of each shape: workers with the most room, to say why a model fits nowhere."""


def for_start(
    model: Model,
    draft: Draft,
    rules: PlacementRules,
    excluding: frozenset[WorkerId] = frozenset(),
    count: int = CONSIDERED,
    *,
    makeable: bool = True,
) -> frozenset[WorkerId]:
    """Workers among which the best ``count`` for one instance of a model are
    (``parallelism.choose_scheme``).

    1. none, where even the roomiest has too little
    2. those with copies of the model, or on which it failed of late, and with enough room: they are
       predicted one by one
    3. of every shape the first ids with enough room, and the first on which it can be made

    Args:
        model: To be started.
        draft: The world.
        rules: How workers are chosen.
        excluding: Workers that may not be chosen.
        count: How many are wanted.
        makeable: Also those on which room is not free, but can be made.
    """
    books, digest = draft.books, model.digest
    rooms, room_on = draft.rooms, draft.known_room(rules)
    if not any(
        draft.needs.of(model, shape.granule_bytes) <= room_on.most(shape) for shape in rooms.shapes
    ):  # 1
        return frozenset()
    found = {
        worker_id for node_id in draft.copies.to(digest) for worker_id in draft.homes.to(node_id)
    }  # 2
    for key in books.by_digest.get(digest, ()):
        if books.records[key].instance.state is InstanceState.FAILED:
            found.update(one.worker_id for one in books.records[key].instance.placements)
    skipped = found | excluding | having(model.name, draft)
    fits = partial(_has_room, room_on=room_on) if makeable else _has_free_room
    found = {one for one in found - excluding if fits(model, one, draft)}
    for shape in rooms.shapes:  # 3
        found.update(
            rooms.first(
                shape,
                draft.needs.of(model, shape.granule_bytes),
                skipped,
                room_on if makeable else None,
                count,
            )
        )
    return frozenset(found)


def nearest(draft: Draft, limit: int) -> frozenset[WorkerId]:
    """Workers of which a decision's record says why they were not chosen: all of a small cluster,
    else the roomiest.
    """
    if len(draft.facts.workers) <= limit:
        return frozenset(draft.facts.workers)
    room_on = draft.known_room(draft.rules.scheme.placement)
    return frozenset(
        one for shape in draft.rooms.shapes for one in draft.rooms.roomiest(shape, room_on, NEAREST)
    )


def for_turns(
    wanted: Iterable[ModelName], demand: Iterable[Demand], draft: Draft, rules: TurnRules
) -> frozenset[WorkerId]:
    """Workers among which the places for a line of models are (``turns.plan_turns``).

    1. those on which something drains, or leaves its node: room is on its way there
    2. when a model that has waited for too long finds no room: those whose busy instances could
       make room (``making_way``)
    3. when there is room for some model: of every shape the roomiest, one more than models can take
       from each other

    Args:
        wanted: Models that are to have one more instance.
        demand: What waits for them.
        draft: The world.
        rules: How turns are taken.
    """
    facts, rooms, needs = draft.facts, draft.rooms, draft.needs
    line = [model for name in set(wanted) if (model := facts.models.get(name)) is not None]
    claims = min(len(line), rules.line_limit)
    found = set(rooms.leaving)  # 1
    for drain in facts.drains:
        for key in draft.books.by_node.get(drain.node_id, ()):
            found.update(one.worker_id for one in draft.books.records[key].instance.placements)
    room_on = draft.known_room(rules.placement)
    fitting = {
        model.name
        for model in line
        if any(
            needs.of(model, shape.granule_bytes) <= room_on.most(shape) for shape in rooms.shapes
        )
    }
    ages_s = {one.model: one.oldest_age_s for one in demand if one.waiting > 0}
    impatient = [model for model in line if ages_s.get(model.name, 0.0) >= rules.patience_s(model)]
    asking = [model for model in impatient if model.name not in fitting]
    ways = making_way(asking, draft, claims)  # 2
    if not fitting:
        return ways.union(found)
    # A model that fits nowhere claims no worker, unless something drains or makes way.
    claiming = (
        claims if found or ways or len(impatient) > len(asking) else min(len(fitting), claims)
    )
    count = claiming + 1 + max(len(having(name, draft)) for name in fitting)
    for shape in rooms.shapes:  # 3
        found.update(rooms.roomiest(shape, room_on, count))
    crowded = _crowded(
        [one for one in impatient if one.name in fitting], found, draft, room_on, claims
    )
    if crowded:
        ways = making_way([*asking, *crowded], draft, claims)
    return ways.union(found)


def _crowded(
    models: Iterable[Model],
    workers: AbstractSet[WorkerId],
    draft: Draft,
    room_on: Exact,
    count: int,
) -> list[Model]:
    """Those of some models for which fewer workers than ``count`` have room. Models that need as
    much, and are nowhere yet, are asked about once.
    """
    granules = {shape.granule_bytes for shape in draft.rooms.shapes}
    alike, found = dict[tuple[object, ...], bool](), list[Model]()
    for model in models:
        if having(model.name, draft):
            has = _has_places(model, workers, draft, room_on, count)
        else:
            needs = (draft.needs.of(model, size) for size in sorted(granules))
            key = (model.spec.part_bytes, *needs)
            if key not in alike:
                alike[key] = _has_places(model, workers, draft, room_on, count)
            has = alike[key]
        if not has:
            found.append(model)
    return found


def _has_places(
    model: Model, workers: AbstractSet[WorkerId], draft: Draft, room_on: Exact, count: int
) -> bool:
    """Whether on so many workers at least there is room for a model."""
    if len(workers) < count:
        return False
    there, pools = having(model.name, draft), dict[Shape, bool]()
    for worker_id in workers:
        slot = draft.rooms.slots.find(worker_id)
        if slot is None or slot.shape is None or worker_id in there:
            continue
        if slot.shape not in pools:
            pools[slot.shape] = slot.shape.pool_holds(model)
        count -= pools[slot.shape] and _has_room(model, worker_id, draft, room_on)
        if count <= 0:
            return True
    return count <= 0


def _has_room(model: Model, worker_id: WorkerId, draft: Draft, room_on: Exact) -> bool:
    """Whether room for a model is free on a worker, or can be made by eviction."""
    slot = draft.rooms.slots.find(worker_id)
    if slot is None or slot.shape is None:
        return False
    least_bytes = draft.needs.of(model, slot.shape.granule_bytes)
    return slot.at_best_bytes >= least_bytes and room_on(worker_id) >= least_bytes


def _has_free_room(model: Model, worker_id: WorkerId, draft: Draft) -> bool:
    """Whether room for a model is free on a worker."""
    slot = draft.rooms.slots.find(worker_id)
    if slot is None or slot.shape is None:
        return False
    return slot.free_bytes >= draft.needs.of(model, slot.shape.granule_bytes)


def having(model: ModelName, draft: Draft) -> frozenset[WorkerId]:
    """Workers with an instance of a model that starts or serves."""
    active = (one for one in draft.instances_of(model) if one.state in STARTING | SERVING)
    return frozenset(placement.worker_id for one in active for placement in one.placements)
