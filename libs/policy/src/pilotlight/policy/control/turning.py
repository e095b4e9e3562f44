"""Whose turn it is: ``turns`` over the workers that can be a place.

Mostly there is room for every model of the line, and the index knows where the most of it is: then
nothing has to be known of instances that could make room, and no snapshot is made. Where workers
have free room enough for a whole line, even if each of its models had one of its own, only the
first turns are worked out: a tick begins a few starts, and mostly the first of the line.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.known_room import KnownRoom
from pilotlight.policy.control.plan import NO_ROOM, Memory
from pilotlight.policy.control.shortlist import for_turns, having
from pilotlight.policy.drain import staying
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.places import Place
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain, Start
from pilotlight.policy.turns import Line, Turn, TurnPlan, line_up, plan_turns, share_room

FEW = 2
"""Turns more than a tick begins starts that are worked out before anybody asks for others."""


class Turned:
    """Turns in their order, and the instances that make room."""

    def __init__(self, plan: TurnPlan, places: int = 0) -> None:
        """A plan of all turns, and the workers that were compared for it."""
        self.turns: Iterable[Turn] = plan.turns
        self.drains: tuple[Drain, ...] = plan.drains
        self.longest_wait_s = plan.longest_wait_s
        self.places = places

    @classmethod
    def one_by_one(cls, line: Line, draft: Draft) -> "Turned":
        """Of a line of which every model is sure of free room, as the draft is now."""
        turned = cls(TurnPlan(longest_wait_s=line.longest_wait_s))
        turned.turns = turned._worked_out(line, draft.kept())
        return turned

    def _worked_out(self, line: Line, draft: Draft) -> Iterator[Turn]:
        """What the first models take does not depend on those behind them."""
        first = line.first[: draft.facts.most_starts(draft.rules) + FEW]
        few = replace(line, everyone=first, first=first)
        so_far = 0
        for some in (few, line) if len(few.everyone) < len(line.everyone) else (line,):
            places = _roomiest(some, draft)
            self.places = len(places)
            plan = share_room(some, places)
            assert plan is not None, "every model was sure of room"
            yield from plan.turns[so_far:]
            so_far = len(plan.turns)


def turns_of(
    starts: Mapping[ModelName, Start], draft: Draft, demand: tuple[Demand, ...], memory: Memory
) -> Turned:
    """The models that may start, and the instances that make room.

    Args:
        starts: What is to start, by model.
        draft: The world.
        demand: What waits.
        memory: Which models were refused, and why.
    """
    if not starts and not demand:
        return Turned(TurnPlan())
    rules = draft.rules.turns
    backing = ((model, memory.backing.get(model)) for model in starts)
    blocked = frozenset(model for model, one in backing if one is not None and one.code != NO_ROOM)
    if starts and not draft.facts.drains:
        line = _line(starts, demand, draft, blocked)
        if line.first and _is_sure(line, draft):
            return Turned.one_by_one(line, draft)
        places = _with_room(line, draft)
        plan = share_room(line, places) if places or not line.first else None
        if plan is not None:
            return Turned(plan, len(places))
    workers = for_turns(starts, demand, draft, rules) if starts else frozenset[WorkerId]()
    books = draft.books
    present = {
        books.records[key].instance.model for one in workers for key in books.by_worker.get(one, ())
    }
    models = {*starts, *(one.model for one in demand), *present}
    plan = plan_turns(staying(draft.slice(models, workers, demand=demand)), starts, rules, blocked)
    return Turned(plan, len(workers))


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


def _is_sure(line: Line, draft: Draft) -> bool:
    """Whether so many workers have free room for any model of the line that each finds one which no
    other has taken, and which has no instance of it.
    """
    left = _places_of(line, draft)
    # Many have parts of the same sizes.
    alike = {model.spec.part_bytes: model for model in line.first}.values()
    needed: dict[int, int] = {}
    for shape, shelves in draft.rooms.shapes.items():
        if not all(map(shape.pool_holds, alike)):
            continue
        granule_bytes = shape.granule_bytes
        if granule_bytes not in needed:
            needed[granule_bytes] = max(draft.needs.of(one, granule_bytes) for one in line.first)
        for free_bytes, _ in islice(reversed(shelves.free.ranked), left):
            if free_bytes < needed[granule_bytes]:
                break
            left -= 1
        if left <= 0:
            return True
    return False


def _places_of(line: Line, draft: Draft) -> int:
    """One more than the models of a line can take from each other."""
    there = (len(having(one.name, draft)) for one in line.first if one.name in draft.books.by_model)
    return len(line.first) + 1 + max(there, default=0)


def _with_room(line: Line, draft: Draft) -> list[Place]:
    """Places for a line; none where some model fits on none of them."""
    room_on = draft.known_room(draft.rules.turns.placement)
    most: dict[int, int] = {}
    for shape in draft.rooms.shapes:
        granule_bytes = shape.granule_bytes
        most[granule_bytes] = max(most.get(granule_bytes, 0), room_on.most(shape))
    if not all(_fits(model, most, draft) for model in line.first):
        return []
    return _roomiest(line, draft)


def _roomiest(line: Line, draft: Draft) -> list[Place]:
    """Places among which the line shares out its room: of every shape one more than its models can
    take from each other, and those on which room is on its way.
    """
    rooms, facts = draft.rooms, draft.facts
    room_on: KnownRoom = draft.known_room(draft.rules.turns.placement)
    there = defaultdict[WorkerId, set[ModelName]](set)
    for model in line.first:
        for worker_id in having(model.name, draft):
            there[worker_id].add(model.name)
    count = _places_of(line, draft)
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
