"""The cold-start scheme: how many workers share a model's first start, which, and with which
layers.

Without a policy of ``coldstart`` every scheme has one stage, on the worker with the least predicted
time. With one, its policy chooses workers, stages and sources, for no more stages than its rules
allow.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import HealthState, WorkerFacts
from pilotlight.policy.coldstart.chosen import ChoiceRules, KnownStarts, choose_with
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.cost import estimate_for, group_tpot_s, group_ttft_s, stage_cost, stage_room
from pilotlight.policy.eviction.base import EvictionPlan
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.placement import (
    Candidate,
    Candidates,
    PlacementRules,
    Rejection,
    candidates,
    eviction_plan,
)
from pilotlight.policy.plan import Placement, Scheme, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRules:
    """Bounds of the choice."""

    placement: PlacementRules = field(default_factory=PlacementRules)
    choice: ChoiceRules | None = None
    """The policy of ``coldstart`` that chooses; the scheduler always names one. None: the least
    predicted time to first token, without books of fetches, as the simulator's ``least-ttft`` and
    the plain tick of tests have it."""
    evicts: bool = True
    """Room may be made; else it must be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All workers, in numbers, for a choice that looks at some of them."""

    workers: int
    sizes: Mapping[tuple[int, int], int]
    """How many devices there are of each granule and memory, in bytes; without those of which
    nothing is known."""

    @classmethod
    def of(cls, workers: Iterable[WorkerFacts]) -> "Fleet":
        """Counted."""
        listed = tuple(workers)
        known = (one.device for one in listed if has_known_room(one))
        return cls(
            workers=len(listed),
            sizes=Counter((one.granule_bytes, one.memory_bytes) for one in known),
        )


CONSIDERED = 8
"""Schemes that a choice tells of, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChoice:
    """The scheme, or why there is none."""

    scheme: Scheme | None
    instances: int = 1
    """That its group is to become."""
    meets_slo: bool = False
    needs_eviction: bool = False
    eviction: EvictionPlan | None = None
    """What would have to go for it, at what loss, by the rule of the cache, which decides."""
    no_worker_ever: bool = False
    """No worker that serves could hold the model even if it were empty: waiting for room does not
    help."""
    never_fits: bool = False
    """Every worker is known to be too small for it, in whatever state it is: what waits for the
    model can be told at once."""
    considered: tuple[Scheme, ...] = ()
    """The best ones, the chosen one first."""
    rejected: tuple[Rejection, ...] = ()
    reason: str = ""


def choose_scheme(
    model: Model,
    snapshot: Snapshot,
    rules: SchemeRules,
    excluding: frozenset[WorkerId] = frozenset(),
    fleet: Fleet | None = None,
    known: KnownStarts | None = None,
    instances: int = 1,
) -> SchemeChoice:
    """Choose how to start a model that has too few instances.

    ParaServe, algorithm 1 (section 4.1), for s = 1 and w = 1, unless the rules name a policy, which
    then has the choice in the place of rules 2 to 5 (``coldstart.chosen``). It departs in rules 3
    and 4, which the paper does not have.

    Args:
        model: Which is to be started.
        snapshot: The facts. They may be of those workers alone that can be the answer
            (``control.rooms``).
        rules: Bounds of the choice.
        excluding: Workers that have just refused, or are left to others.
        fleet: All workers, in numbers; None: the snapshot's are all.
        known: What was learned, and the fetches that run; for a policy alone.
        instances: How many more the model is to have; for a policy alone.

    1. no worker has room and none can be made: no scheme
    2. predict the time to first token on every candidate
    3. prefer a worker on which the model has not just failed, then one whose device is not degraded
    4. then one that meets the SLO, then one with free room over one where something must be evicted
    5. then the least predicted time to first token; ties by worker id
    """
    whole = model.spec.whole
    if rules.choice is not None:
        return _by_policy(
            model,
            snapshot,
            rules,
            rules.choice,
            excluding,
            fleet,
            known or KnownStarts(),
            instances,
        )
    found = _candidates(model, whole, snapshot, rules, excluding)
    if not found.fitting and not found.makeable:  # 1
        return _none(model, fleet or Fleet.of(snapshot.workers), found.rejected, model.spec.whole)
    ranked: list[tuple[tuple[bool, bool, bool, bool, float, str], Scheme, Candidate]] = []
    for candidate in (*found.fitting, *found.makeable):
        scheme = _whole_on(model, candidate, snapshot)  # 2
        misses_slo = not _meets_slo(model, scheme)
        evicts = candidate in found.makeable
        worker, ttft_s = candidate.worker, scheme.predicted_ttft_s
        key = (
            candidate.failed_here,
            candidate.degraded,
            misses_slo,
            evicts,
            ttft_s,
            worker.worker_id,
        )  # 3 - 5
        ranked.append((key, scheme, candidate))
    ranked.sort(key=lambda one: one[0])
    (failed_here, degraded, misses_slo, evicts, _, worker_id), scheme, chosen = ranked[0]
    eviction = eviction_plan(model, whole, chosen, snapshot, rules.placement) if evicts else None
    notes = [
        f"{worker_id} gives the first token in {scheme.predicted_ttft_s:.2f} s, the SLO is {model.slo.ttft_ms / 1000:.2f} s"
    ]
    notes += ["the model has just failed there, and there is no other"] if failed_here else []
    notes += ["its device is degraded, and there is no other"] if degraded else []
    notes += (
        [f"room must be made first: {eviction.reason}, at a loss of {eviction.loss:.3g}"]
        if eviction is not None
        else []
    )
    return SchemeChoice(
        scheme=scheme,
        meets_slo=not misses_slo,
        needs_eviction=evicts,
        eviction=eviction,
        considered=tuple(one for _, one, _ in ranked[:CONSIDERED]),
        rejected=found.rejected,
        reason="; ".join(notes),
    )


def _candidates(
    model: Model,
    stage: Stage,
    snapshot: Snapshot,
    rules: SchemeRules,
    excluding: frozenset[WorkerId],
) -> Candidates:
    """``candidates``, with what the rules leave of them.

    Args:
        model: To be started.
        stage: What a worker is to hold.
        snapshot: The facts.
        rules: Whether room may be made.
        excluding: Workers that may not be chosen.
    """
    found = candidates(model, stage, snapshot, rules.placement, excluding, evicts=rules.evicts)
    return found if rules.evicts else replace(found, makeable=())


def _by_policy(
    model: Model,
    snapshot: Snapshot,
    rules: SchemeRules,
    choice: ChoiceRules,
    excluding: frozenset[WorkerId],
    fleet: Fleet | None,
    known: KnownStarts,
    instances: int,
) -> SchemeChoice:
    """What a policy of ``coldstart`` chooses.

    Args:
        model: To be started.
        snapshot: The facts.
        rules: Bounds of placements.
        choice: The policy.
        excluding: Workers that may not be chosen.
        fleet: All workers, in numbers.
        known: What was learned, and the fetches that run.
        instances: How many more the model is to have.
    """
    if model.spec.pooling is not None:
        # Vectors and scores are made by whole models alone.
        choice = replace(choice, start=replace(choice.start, max_stages=1))
    size = min(choice.start.max_stages, model.spec.num_layers)
    least = min(even_stages(model.spec, size), key=model.device_bytes)
    found = _candidates(model, least, snapshot, rules, excluding)
    fleet = fleet or Fleet.of(snapshot.workers)
    if not found.fitting and not found.makeable:
        return _none(model, fleet, found.rejected, least)
    workers = (*found.fitting, *found.makeable)
    whole = is_within_a_device(model, fleet)
    chosen = choose_with(model, workers, snapshot, choice, known, instances, whole=whole)
    if chosen is None:
        none = _none(model, fleet, found.rejected, least)
        return replace(none, reason=f"{none.reason}, or what runs there would be late")
    scheme, eviction = chosen.scheme, None
    if chosen.evicts and scheme.pipeline_size == 1:
        eviction = eviction_plan(
            model, model.spec.whole, chosen.candidates[0], snapshot, rules.placement
        )
    places = ", ".join(one.worker_id for one in scheme.placements)
    become = f", and become {chosen.instances} instances" if chosen.instances > 1 else ""
    return SchemeChoice(
        scheme=scheme,
        instances=chosen.instances,
        meets_slo=chosen.meets_slo,
        needs_eviction=chosen.evicts,
        eviction=eviction,
        considered=(scheme, *chosen.alternatives),
        rejected=found.rejected,
        reason=f"{choice.policy.value}: {places} give the first token in "
        f"{scheme.predicted_ttft_s:.2f} s, the SLO is {model.slo.ttft_ms / 1000:.2f} s{become}",
    )


def _whole_on(model: Model, candidate: Candidate, snapshot: Snapshot) -> Scheme:
    whole = model.spec.whole
    estimate = estimate_for(model.name, candidate.worker.device.kind, snapshot.estimates)
    cost = stage_cost(model, whole, candidate.worker, candidate.node, estimate)
    placement = Placement(
        worker_id=candidate.worker.worker_id,
        node_id=candidate.node.node_id,
        stage=whole,
        device_bytes=stage_room(model, whole, candidate.worker.device.granule_bytes).granted_bytes(
            candidate.free_bytes
        ),
    )
    return Scheme(
        pipeline_size=1,
        full_memory_workers=1,
        placements=(placement,),
        predicted_ttft_s=group_ttft_s((cost,)),
        predicted_tpot_s=group_tpot_s((cost,)),
    )


def _meets_slo(model: Model, scheme: Scheme) -> bool:
    return (
        scheme.predicted_ttft_s * 1000 <= model.slo.ttft_ms
        and scheme.predicted_tpot_s * 1000 <= model.slo.tpot_ms
    )


def _none(
    model: Model, fleet: Fleet, rejected: tuple[Rejection, ...], smallest: Stage
) -> SchemeChoice:
    """Why there is no scheme.

    Args:
        model: To be started.
        fleet: All workers, in numbers.
        rejected: Some of them, and why.
        smallest: Of the stages that a worker may be asked to hold.
    """
    least = {size: stage_room(model, model.spec.whole, size[0]).least_bytes for size in fleet.sizes}
    hopeless = not is_within_a_device(model, fleet, smallest)
    serving = sum(fleet.sizes.values())
    if not fleet.workers:
        reason = "no worker has reported"
    elif not serving:
        reason = f"none of {fleet.workers} workers serves: their devices have failed, or their engines are down"
    elif hopeless:
        others = " that serves" if serving < fleet.workers else ""
        reason = f"the model needs {min(least.values())} bytes of device memory, more than any worker has{others}"
    else:
        reason = f"none of {fleet.workers} workers has room or can make it"
    return SchemeChoice(
        scheme=None,
        no_worker_ever=hopeless,
        never_fits=hopeless and 0 < serving == fleet.workers,
        rejected=rejected,
        reason=reason,
    )


def is_within_a_device(model: Model, fleet: Fleet, stage: Stage | None = None) -> bool:
    """Whether some device could hold the whole model, or a stage of it, if it were empty."""
    layers = stage or model.spec.whole
    return any(
        memory_bytes >= stage_room(model, layers, granule_bytes).least_bytes
        for granule_bytes, memory_bytes in fleet.sizes
    )


def has_known_room(worker: WorkerFacts) -> bool:
    """Its device's memory says something of what it can hold: one that has failed holds nothing,
    and an engine that has not been up has not said how much there is.
    """
    return worker.health.state is not HealthState.FAILED and (
        worker.engine_up or worker.device.memory_bytes > 0
    )
