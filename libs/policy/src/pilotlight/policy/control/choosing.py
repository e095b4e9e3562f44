"""Where one start goes: what the choice looks at, and the choice."""

from collections import defaultdict
from dataclasses import replace

from pilotlight.policy.coldstart.chosen import ALTERNATIVES
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.shortlist import for_start, nearest
from pilotlight.policy.control.starts import Chosen
from pilotlight.policy.estimates import estimates_of
from pilotlight.policy.ids import Digest, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.parallelism import CONSIDERED, choose_scheme
from pilotlight.policy.plan import Snapshot
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
    workers = for_start(model, draft, rules.scheme.placement, excluded, count)
    ours = tuple(one for one in demand if one.model == model.name)
    fleet, known = draft.rooms.fleet, draft.known_starts
    if not workers and not explained:
        seen = draft.slice((model.name,), demand=ours)
        return seen, choose_scheme(model, seen, asked, excluded, fleet, known, instances)
    if not workers or in_groups or len(draft.facts.workers) <= rules.explained_workers:
        workers |= nearest(draft, rules.explained_workers)
    seen = slice_for(model, draft.slice((model.name,), workers, model.digest, ours))
    return seen, choose_scheme(model, seen, asked, excluded, fleet, known, instances)


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
