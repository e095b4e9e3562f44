"""Whose turn it is when more models are wanted than there are places.

``scaling`` says which models are to have one more instance, ``parallelism`` where one fits. Here is
said which model goes first, what is kept for it, and which busy instance makes room when a request
has waited for too long::

    service of one place    | load A | A serves, at least what it is owed   | drains | load B | B serves ...
    waiting for B                          | ...... B's patience ......|                |
                                           '- B's oldest request       '- A stops taking requests

Everything follows from rows, reports and the ages of demand: a new leader decides as the old one
did.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import HeldStage, HeldState
from pilotlight.policy.failures import failed_starts_s
from pilotlight.policy.ids import ModelName, WorkerId
from pilotlight.policy.instance import ENDED, SERVING, STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.placement import PlacementRules, by_worker, room_on, seen_on, why_unusable
from pilotlight.policy.places import Importance, Need, Place, Rooms
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.scaling import Drain


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Figures of the decision."""

    patience_slo_factor: float = 2.0
    """A model that is served nowhere waits for this multiple of its TTFT SLO before a busy instance
    makes room for it."""
    overdue_s: float = 5.0
    """A drain that has gone on for so long beyond its limit, or without one, is not counted on."""
    line_limit: int = 64
    """Models that are looked at one by one; those behind them take what is left."""
    placement: PlacementRules = field(default_factory=PlacementRules)

    def patience_s(self, model: Model) -> float:
        """How long a model waits before others have to make room."""
        return self.patience_slo_factor * model.slo.ttft_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model that may be started, and what it must leave to others."""

    model: ModelName
    left: frozenset[WorkerId] = frozenset()
    """Workers whose room is for models that are before it in the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """The models that start, in this order; the instances that make room."""

    turns: tuple[Turn, ...] = ()
    drains: tuple[Drain, ...] = ()
    longest_wait_s: float = 0.0
    """Of the models that are served nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Models that are to have one more instance, in the order of their turns."""

    everyone: tuple[Model, ...]
    first: tuple[Model, ...]
    """Those that are looked at one by one, for which room is kept."""
    longest_wait_s: float
    """Of the models that are served nowhere."""


def plan_turns(
    snapshot: Snapshot,
    wanted: Iterable[ModelName],
    rules: TurnRules,
    blocked: frozenset[ModelName] = frozenset(),
) -> TurnPlan:
    """Share out what room there is among the models that are to have one more instance.

    The line: models that are served nowhere before those that are; of these the one first that has
    waited for the most times its patience, so that of models with one SLO the oldest waiter is
    first. Models that are ``blocked``, because what they lack is not room on a device, come last,
    and nothing is kept for them. For each in turn:

    1. some worker has room, or eviction makes it at once: that is kept for it
    2. room is on its way, because something drains: that is kept for it
    3. it has not waited for as long as its patience, is served somewhere, or could not be loaded
       time and again: it waits
    4. busy instances make room, as few as possible, the least important first: they take no new
       requests and end what they have

    A model that comes later leaves what is kept for others. No instance makes room before it has
    served for what its load is owed (``ServiceRules``), when its model is pinned, or when its model
    would have fewer instances than its minimum. The least important instance is one whose model is
    served elsewhere too, then the one that has served for the longest.

    A request that outlasts its instance's drain goes on elsewhere: the drain lasts no longer than
    the patience of the model that waits, or than the load that it makes undone.

    Args:
        snapshot: workers, nodes, instances and demand, as of its ``now_s``.
        wanted: the models that are to have one more instance.
        rules: patience, and what an instance is owed for its load.
        blocked: models that lack something else than room on a device.
    """
    models = {model.name: model for model in snapshot.models}
    waiting = {one.model: one for one in snapshot.demand if one.waiting > 0}
    served = {one.model for one in snapshot.instances if one.state in STARTING | SERVING}
    line = line_up(
        (models[name] for name in set(wanted) if name in models),
        snapshot.demand,
        served,
        rules,
        blocked,
    )
    if not line.everyone:
        return TurnPlan(longest_wait_s=line.longest_wait_s)
    places = _places(snapshot, models, rules)
    spare = Counter(one.model for one in snapshot.instances if one.state in SERVING)
    spare.subtract({model.name: model.scaling.min_instances for model in snapshot.models})
    ranked, rooms = _ranked(places, spare), Rooms(places)
    drains: list[Drain] = []

    def make_way(model: Model, need: Need) -> Place | None:
        place = rooms.coming(need)  # 2
        demand = waiting.get(model.name)
        asks = (
            demand is not None
            and model.name not in served
            and _may_ask(model, demand, snapshot, rules)
        )  # 3
        if place is None and asks:
            place, victims = _cheapest(ranked, need, spare)  # 4
            for victim in victims:
                spare[victim.model] -= 1
                for other in places:
                    other.give(victim)
                drains.append(_drain(victim, model, waiting[model.name], snapshot, rules))
        return place

    turns = _taken_up(line, rooms, make_way)
    return TurnPlan(turns=turns, drains=tuple(drains), longest_wait_s=line.longest_wait_s)


def share_room(line: Line, places: list[Place]) -> TurnPlan | None:
    """Rule 1 for a whole line; None where that is not all, because some model finds no room. Places
    need not say what is on its way out.
    """
    unmet: list[Model] = []
    turns = _taken_up(line, Rooms(places), lambda model, _: unmet.append(model))
    return None if unmet else TurnPlan(turns=turns, longest_wait_s=line.longest_wait_s)


def line_up(
    wanted: Iterable[Model],
    demand: Iterable[Demand],
    served: AbstractSet[ModelName],
    rules: TurnRules,
    blocked: frozenset[ModelName] = frozenset(),
) -> Line:
    """Models that are to have one more instance, in the order of their turns.

    Args:
        wanted: The models.
        demand: What waits.
        served: Models with an instance that starts or serves.
        rules: Patience, and how many are looked at one by one.
        blocked: Models that come last.
    """
    waiting = {one.model: one for one in demand if one.waiting > 0}

    def order(model: Model) -> tuple[bool, float, ModelName]:
        asked = waiting.get(model.name)
        age_s = asked.oldest_age_s if asked is not None else 0.0
        return model.name in served, -age_s / max(rules.patience_s(model), 1e-9), model.name

    everyone = tuple(sorted(wanted, key=order))
    first = [model for model in everyone if model.name not in blocked][: rules.line_limit]
    return Line(
        everyone=everyone,
        first=tuple(first),
        longest_wait_s=max(
            (one.oldest_age_s for name, one in waiting.items() if name not in served), default=0.0
        ),
    )


def _taken_up(
    line: Line, rooms: Rooms, make_way: Callable[[Model, Need], Place | None]
) -> tuple[Turn, ...]:
    """Turns of all models, each with what is kept for those before it.

    Args:
        line: The models.
        rooms: What there is.
        make_way: Where a model that finds no room is to get some.
    """
    claimed: list[Place] = []
    turns: list[Turn] = []
    tightest_bytes = math.inf  # Of the claimed places: mostly enough for everybody.
    for model in line.first:
        need = Need(model)
        left = [
            place
            for place in (claimed if tightest_bytes < rooms.most_bytes(need) else ())
            if place.room_bytes < need.device_bytes(place) and need.is_met_by(place)
        ]
        turns.append(
            Turn(model=model.name, left=frozenset(place.worker.worker_id for place in left))
        )
        place = rooms.free(need) or make_way(model, need)  # 1
        if place is not None:
            if not place.claimed:
                claimed.append(place)
            rooms.claim(place, need)
            tightest_bytes = min(tightest_bytes, place.room_bytes)
    taken = frozenset(place.worker.worker_id for place in claimed)
    ahead = {model.name for model in line.first}
    behind = (model for model in line.everyone if model.name not in ahead)
    return (*turns, *(Turn(model=model.name, left=taken) for model in behind))


def _ranked(places: Iterable[Place], spare: Counter[ModelName]) -> list[Place]:
    """Those with instances that may be asked to make room, the least important of these first."""
    ranked = [place for place in places if place.victims]
    for place in ranked:
        place.least_important = min(_importance(one, spare) for one, _ in place.victims)
    return sorted(ranked, key=lambda place: (place.least_important, place.worker.worker_id))


def _may_ask(model: Model, demand: Demand, snapshot: Snapshot, rules: TurnRules) -> bool:
    """Whether others are to make room: a second failed start in a row is no reason to disturb them
    a third time.
    """
    return (
        demand.oldest_age_s >= rules.patience_s(model)
        and len(failed_starts_s(model, snapshot.instances)) < 2
    )


def _cheapest(
    ranked: list[Place], need: Need, spare: Counter[ModelName]
) -> tuple[Place | None, list[Instance]]:
    """The worker where the fewest instances have to go; of several, where the most important of
    them is the least so.

    ``ranked`` begins with the workers of the least important instances. One instance at least has
    to go, and instances become no less important while others are chosen, so the search ends where
    no later worker can be cheaper.
    """
    best: tuple[tuple[int, Importance, WorkerId], Place, list[Instance]] | None = None
    for place in ranked:
        if best is not None and best[0][:2] < (1, place.least_important):
            break
        if not place.victims or not need.is_met_by(place):
            continue
        chosen = _victims(place, need.device_bytes(place), spare)
        if chosen:
            key = (
                len(chosen),
                max(_importance(one, spare) for one in chosen),
                place.worker.worker_id,
            )
            if best is None or key < best[0]:
                best = key, place, chosen
    return (best[1], best[2]) if best is not None else (None, [])


def _drain(
    victim: Instance, model: Model, demand: Demand, snapshot: Snapshot, rules: TurnRules
) -> Drain:
    patience_s = rules.patience_s(model)
    served_s, owed_s = snapshot.now_s - victim.state_since_s, rules.placement.service.owed_s(victim)
    return Drain(
        instance_id=victim.instance_id,
        model=victim.model,
        reason=f"{model.name} has waited for {demand.oldest_age_s:.1f} s, its patience is {patience_s:.1f} s; "
        f"this one has served for {served_s:.1f} s, its load is owed {owed_s:.1f} s",
        within_s=max(patience_s, victim.load_s),
        makes_way_for=model.name,
        unless_pinned=True,
    )


def _victims(place: Place, least_bytes: int, spare: Counter[ModelName]) -> list[Instance]:
    """The least important instances that are enough; none where all together are not."""
    missing_bytes = least_bytes - place.room_bytes - place.coming_bytes
    chosen: list[Instance] = []
    taken: Counter[ModelName] = Counter()
    for instance, size_bytes in sorted(place.victims, key=lambda one: _importance(one[0], spare)):
        if missing_bytes <= 0:
            break
        if spare[instance.model] - taken[instance.model] > 0:
            taken[instance.model] += 1
            chosen.append(instance)
            missing_bytes -= size_bytes
    return chosen if missing_bytes <= 0 else []


def _importance(instance: Instance, spare: Counter[ModelName]) -> Importance:
    """The least important first: others of its model serve too, then it has served for the
    longest.
    """
    return spare[instance.model] <= 1, instance.state_since_s, instance.instance_id


def _places(snapshot: Snapshot, models: dict[ModelName, Model], rules: TurnRules) -> list[Place]:
    """Every worker on which something can be placed."""
    snapshot = replace(
        snapshot, instances=tuple(one for one in snapshot.instances if one.state not in ENDED)
    )
    nodes = {node.node_id: node for node in snapshot.nodes}
    on = by_worker(snapshot)
    places: list[Place] = []
    for worker in snapshot.workers:
        node = nodes.get(worker.node_id)
        if node is None or why_unusable(worker, node) is not None:
            continue
        present = on.get(worker.worker_id, [])
        room_bytes = room_on(worker, seen_on(worker, snapshot, on, models), rules.placement)
        held = {one.instance_id: one for one in worker.held}
        here = [one for one in present if one.instance_id in held]
        places.append(
            Place(
                worker=worker,
                node=node,
                room_bytes=room_bytes,
                coming_bytes=sum(
                    held[one.instance_id].device_bytes
                    for one in here
                    if _is_leaving(one, held[one.instance_id], snapshot, rules)
                ),
                models=frozenset(one.model for one in present if one.state in STARTING | SERVING),
                victims=[
                    (one, held[one.instance_id].device_bytes)
                    for one in here
                    if held[one.instance_id].state is HeldState.READY
                    and _may_go(one, models.get(one.model), snapshot.now_s, rules)
                ],
            )
        )
    return places


def _may_go(instance: Instance, model: Model | None, now_s: float, rules: TurnRules) -> bool:
    """Whether a busy instance may be asked to make room."""
    busy = instance.state in SERVING and instance.in_flight > 0
    return (
        busy
        and model is not None
        and not model.pinned
        and rules.placement.service.has_served(instance, now_s)
    )


def _is_leaving(instance: Instance, held: HeldStage, snapshot: Snapshot, rules: TurnRules) -> bool:
    """Whether its room can be counted on.

    What its worker still reports as ready and idle is evictable, and counts as that.
    """
    if instance.state is not InstanceState.DRAINING or (
        held.state is HeldState.READY and held.in_flight == 0
    ):
        return False
    return (
        snapshot.now_s - instance.state_since_s < (instance.drain_within_s or 0.0) + rules.overdue_s
    )
