"""Where one start goes: what the choice looks at, and the choice."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from pilotlight.policy.cluster import HealthState
from pilotlight.policy.coldstart.chosen import ALTERNATIVES, is_late
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.shortlist import for_start, nearest
from pilotlight.policy.control.starts import Chosen
from pilotlight.policy.estimates import estimates_of
from pilotlight.policy.ids import Digest, NodeId, WorkerId
from pilotlight.policy.instance import STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import (
    CONSIDERED,
    SchemeChoice,
    choose_scheme,
    is_within_a_device,
)
from pilotlight.policy.plan import Instance, InstanceState, Snapshot
from pilotlight.policy.request import Demand


def choose_among(
    model: Model,
    excluded: frozenset[WorkerId],
    demand: tuple[Demand, ...],
    *,
    explained: bool,
    ahead: bool,
    instances: int,
    draft: Draft,
) -> Chosen:
    """The scheme of a start, and what it was chosen from: the workers that can be the answer, and
    those that explain it.

    Args:
        model: To be started.
        excluded: Workers that may not be chosen.
        demand: Of all models.
        explained: Also where no worker can be the answer.
        ahead: In free room alone.
        instances: How many more the model is to have: of its first group they are some.
        draft: The world.
    """
    rules = draft.rules
    asked = replace(rules.scheme, evicts=not ahead)
    choice = rules.scheme.choice
    in_groups = choice is not None and choice.start.max_stages > 1
    # Of workers that are alike, as many as a choice of single ones tells of.
    count = CONSIDERED if choice is None or in_groups else ALTERNATIVES + 1
    ours = tuple(one for one in demand if one.model == model.name)
    fleet, known = draft.rooms.fleet, draft.known_starts
    if not explained and not in_groups and _is_plain(model, draft):
        free = for_start(model, draft, rules.scheme.placement, excluded, count, makeable=False)
        seen = _glance_at(model, free, draft, ours)
        in_room = replace(asked, evicts=False)
        found = choose_scheme(model, seen, in_room, excluded, fleet, known, instances)
        late = any(is_late(model, one.oldest_age_s) for one in ours)
        if (found.meets_slo or late) and _stands(found, draft):
            return seen, found
    workers = for_start(model, draft, rules.scheme.placement, excluded, count)
    # One that no device could hold is started in parts alone.
    in_parts = in_groups and not is_within_a_device(model, fleet)
    if not workers and not explained and not in_parts:
        seen = draft.slice((model.name,), demand=ours)
        return seen, choose_scheme(model, seen, asked, excluded, fleet, known, instances)
    if not workers or in_groups or len(draft.facts.workers) <= rules.explained_workers:
        workers |= nearest(draft, rules.explained_workers)
    seen = slice_for(model, draft.slice((model.name,), workers, model.digest, ours))
    return seen, choose_scheme(model, seen, asked, excluded, fleet, known, instances)


def _is_plain(model: Model, draft: Draft) -> bool:
    """Whether a choice in free room may stand whatever eviction could free: a policy prefers free
    room where the SLO is met, or cannot be, and the model has failed nowhere. A small cluster is
    shown whole.
    """
    if draft.rules.scheme.choice is None:
        return False
    if len(draft.facts.workers) <= draft.rules.explained_workers:
        return False
    return all(one.state is not InstanceState.FAILED for one in _of_digest(model, draft))


def _of_digest(model: Model, draft: Draft) -> Iterable[Instance]:
    records = draft.books.records
    return (records[one].instance for one in draft.books.by_digest.get(model.digest, ()))


def _stands(found: SchemeChoice, draft: Draft) -> bool:
    """Whether no worker on which room must be made could be a better choice than one that is in
    time, or as late as any.
    """
    if found.scheme is None or found.needs_eviction:
        return False
    views = (draft.facts.workers[one.worker_id] for one in found.scheme.placements)
    return all(one.facts.health.state is not HealthState.DEGRADED for one in views)


def _glance_at(
    model: Model, workers: Iterable[WorkerId], draft: Draft, demand: tuple[Demand, ...]
) -> Snapshot:
    """What a choice in free room looks at: of workers what is held there and what is promised, of
    nodes copies of the model. What could be evicted is left out.

    Args:
        model: To be started.
        workers: On which room is free.
        draft: The world.
        demand: Of the model.
    """
    facts, books = draft.facts, draft.books
    views = [facts.workers[one].facts for one in sorted(workers) if one in facts.workers]
    planned = books.by_digest.get(model.digest, ())
    ids = {*books.by_model.get(model.name, ())}
    ids.update(
        one
        for worker in views
        for one in books.by_worker.get(worker.worker_id, ())
        if books.records[one].instance.state in STARTING
    )
    instances = [
        books.records[one].instance for one in (*planned, *sorted(ids.difference(planned)))
    ]
    node_ids = {one.node_id for one in views} | draft.copies.to(model.digest)
    node_ids.update(
        one.node_id for each in planned for one in books.records[each].instance.placements
    )
    seen = (draft.glances.node(one, model.digest) for one in sorted(node_ids))
    return Snapshot(
        now_s=facts.now_s,
        epoch=facts.term.epoch,
        models=(model,),
        nodes=tuple(one for one in seen if one is not None),
        workers=tuple(views),
        instances=tuple(instances),
        demand=demand,
        estimates=estimates_of((model.name,), facts.estimates),
        arrivals=facts.arrivals.of((model.name,)),
        drains=facts.drains,
    )


def slice_for(model: Model, snapshot: Snapshot) -> Snapshot:
    """What a decision over one model looks at: everything but other models' demand, and what is
    known of models that are on no device and could not make room.
    """
    named = {held.model for worker in snapshot.workers for held in worker.held} | {model.name}
    digests: defaultdict[NodeId, set[Digest]] = defaultdict(lambda: {model.digest})
    for worker in snapshot.workers:
        digests[worker.node_id].update(held.digest for held in worker.held)
    return replace(
        snapshot,
        models=tuple(one for one in snapshot.models if one.name in named),
        nodes=tuple(
            replace(
                node,
                copies=tuple(copy for copy in node.copies if copy.digest in digests[node.node_id]),
            )
            for node in snapshot.nodes
        ),
        demand=tuple(one for one in snapshot.demand if one.model == model.name),
        estimates=estimates_of(named, snapshot.estimates),
        arrivals=snapshot.arrivals.of(sorted(named)),
    )
