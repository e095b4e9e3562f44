"""Which workers can be the answer of a placement: the policies look at these, and answer as if they
had looked at all.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from pilotlight.policy.control.draft import Draft
from pilotlight.policy.cost import stage_room
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
) -> frozenset[WorkerId]:
    """Workers among which the best ``count`` for one instance of a model are
    (``parallelism.choose_scheme``).

    1. those with copies of the model, or on which it failed of late: they are predicted one by one
    2. of every shape the first ids with enough room, and the first on which it can be made

    Args:
        model: To be started.
        draft: The world.
        rules: How workers are chosen.
        excluding: Workers that may not be chosen.
        count: How many are wanted.
    """
    books, digest = draft.books, model.digest
    found = {
        worker_id for node_id in draft.copies.to(digest) for worker_id in draft.homes.to(node_id)
    }  # 1
    for key in books.by_digest.get(digest, ()):
        if books.records[key].instance.state is InstanceState.FAILED:
            found.update(one.worker_id for one in books.records[key].instance.placements)
    skipped = found | excluding | _having(model.name, draft)
    for shape in draft.rooms.shapes:  # 2
        least_bytes = stage_room(model, model.spec.whole, shape.granule_bytes).least_bytes
        found.update(
            draft.rooms.first(
                shape, least_bytes, skipped, lambda one: draft.room_on(one, rules), count
            )
        )
    return frozenset(found)


def nearest(draft: Draft, limit: int) -> frozenset[WorkerId]:
    """Workers of which a decision's record says why they were not chosen: all of a small cluster,
    else the roomiest.
    """
    if len(draft.facts.workers) <= limit:
        return frozenset(draft.facts.workers)
    rules = draft.rules.scheme.placement
    shapes = draft.rooms.shapes
    return frozenset(
        one
        for shape in shapes
        for one in draft.rooms.roomiest(shape, lambda one: draft.room_on(one, rules), NEAREST)
    )


def for_turns(
    wanted: Iterable[ModelName], demand: Iterable[Demand], draft: Draft, rules: TurnRules
) -> frozenset[WorkerId]:
    """Workers among which the places for a line of models are (``turns.plan_turns``).

    1. of every shape the roomiest: one more than models can take from each other
    2. those on which something drains, or leaves its node: room is on its way there
    3. when a model has waited for too long and finds no room: all on which requests run, for some
       may make room

    Args:
        wanted: Models that are to have one more instance.
        demand: What waits for them.
        draft: The world.
        rules: How turns are taken.
    """
    facts, rooms, placement = draft.facts, draft.rooms, rules.placement
    line = [model for name in set(wanted) if (model := facts.models.get(name)) is not None]
    taken = min(len(line), rules.line_limit)
    count = taken + 1 + max((len(_having(model.name, draft)) for model in line), default=0)
    found = {
        one
        for shape in rooms.shapes
        for one in rooms.roomiest(shape, lambda one: draft.room_on(one, placement), count)
    }  # 1
    found |= rooms.leaving  # 2
    for drain in facts.drains:
        for key in draft.books.by_node.get(drain.node_id, ()):
            found.update(one.worker_id for one in draft.books.records[key].instance.placements)
    ages_s = {one.model: one.oldest_age_s for one in demand if one.waiting > 0}
    impatient = [model for model in line if ages_s.get(model.name, 0.0) >= rules.patience_s(model)]
    if any(_places(model, found, draft, placement) < taken for model in impatient):  # 3
        found |= rooms.busy
    return frozenset(found)


def _places(
    model: Model, workers: AbstractSet[WorkerId], draft: Draft, rules: PlacementRules
) -> int:
    """On how many workers there is room for a model."""
    count = 0
    for worker_id in workers - _having(model.name, draft):
        slot = draft.rooms.slots.find(worker_id)
        if slot is None or slot.shape is None:
            continue
        view = draft.facts.workers[worker_id]
        node = draft.facts.nodes[view.facts.node_id]
        least_bytes = stage_room(model, model.spec.whole, slot.shape.granule_bytes).least_bytes
        fits = (
            slot.at_best_bytes >= least_bytes
            and node.pool_room_bytes(model.spec.part_bytes) <= node.pool_bytes
        )
        count += fits and draft.room_on(worker_id, rules) >= least_bytes
    return count


def _having(model: ModelName, draft: Draft) -> frozenset[WorkerId]:
    """Workers with an instance of a model that starts or serves."""
    active = (one for one in draft.instances_of(model) if one.state in STARTING | SERVING)
    return frozenset(placement.worker_id for one in active for placement in one.placements)
