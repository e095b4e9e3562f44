"""Whose turn it is: ``turns`` over the workers that can be a place.

Mostly there is room for every model of the line, and the index knows where the most of it is: then
nothing has to be known of instances that could make room, and no snapshot is made.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.plan import NO_ROOM, Memory
from pilotlight.policy.control.shortlist import for_turns, having
from pilotlight.policy.drain import staying
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.places import Place
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Start
from pilotlight.policy.turns import Line, TurnPlan, line_up, plan_turns, share_room


def turns_of(
    starts: Mapping[ModelName, Start], draft: Draft, demand: tuple[Demand, ...], memory: Memory
) -> tuple[TurnPlan, int]:
    """The models that may start, and the instances that make room; how many workers were compared
    for that.

    Args:
        starts: What is to start, by model.
        draft: The world.
        demand: What waits.
        memory: Which models were refused, and why.
    """
    if not starts and not demand:
        return TurnPlan(), 0
    rules = draft.rules.turns
    backing = ((model, memory.backing.get(model)) for model in starts)
    blocked = frozenset(model for model, one in backing if one is not None and one.code != NO_ROOM)
    if starts and not draft.facts.drains:
        line = _line(starts, demand, draft, blocked)
        places = _roomiest(line, draft)
        plan = share_room(line, places) if places or not line.first else None
        if plan is not None:
            return plan, len(places)
    workers = for_turns(starts, demand, draft, rules) if starts else frozenset[WorkerId]()
    books = draft.books
    present = {
        books.records[key].instance.model for one in workers for key in books.by_worker.get(one, ())
    }
    models = {*starts, *(one.model for one in demand), *present}
    return plan_turns(
        staying(draft.slice(models, workers, demand=demand)), starts, rules, blocked
    ), len(workers)


def _line(
    starts: Iterable[ModelName],
    demand: tuple[Demand, ...],
    draft: Draft,
    blocked: frozenset[ModelName],
) -> Line:
    models = [one for name in starts if (one := draft.facts.models.get(name)) is not None]
    names = {one.name for one in models} | {one.model for one in demand}
    served = {name for name in names if name in draft.books.by_model and having(name, draft)}
    return line_up(models, demand, served, draft.rules.turns, blocked)


def _roomiest(line: Line, draft: Draft) -> list[Place]:
    """Places among which the line shares out its room: of every shape one more than its models can
    take from each other, and those on which room is on its way; none where some model fits on none
    of them.
    """
    room_on, rooms, facts = draft.known_room(draft.rules.turns.placement), draft.rooms, draft.facts
    most: dict[int, int] = {}
    for shape in rooms.shapes:
        granule_bytes = shape.granule_bytes
        most[granule_bytes] = max(most.get(granule_bytes, 0), room_on.most(shape))
    if not all(_fits(model, most, draft) for model in line.first):
        return []
    there = defaultdict[WorkerId, set[ModelName]](set)
    on = {model.name: having(model.name, draft) for model in line.first}
    for name, worker_ids in on.items():
        for worker_id in worker_ids:
            there[worker_id].add(name)
    count = len(line.first) + 1 + max(map(len, on.values()), default=0)
    found = {one for one in rooms.leaving if rooms.slots[one].shape is not None}
    for shape in rooms.shapes:
        found.update(rooms.roomiest(shape, room_on, count))
    views = {one: facts.workers[one].facts for one in found}
    return [
        Place(
            worker=worker,
            node=facts.nodes[worker.node_id],
            room_bytes=room_on(worker_id),
            coming_bytes=0,
            models=frozenset(there.get(worker_id, ())),
            victims=[],
        )
        for worker_id, worker in views.items()
    ]


def _fits(model: Model, most: Mapping[int, int], draft: Draft) -> bool:
    return any(draft.needs.of(model, size) <= room_bytes for size, room_bytes in most.items())
