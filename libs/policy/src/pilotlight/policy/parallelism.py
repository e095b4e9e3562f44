"""The cold-start scheme: how many workers share a model's first start, which, and with which
layers.

A policy of ``coldstart`` chooses workers, stages and sources, for no more stages than its rules
allow.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import HealthState, WorkerFacts
from pilotlight.policy.coldstart.chosen import ChoiceRules, KnownStarts, choose_with
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.cost import stage_room
from pilotlight.policy.eviction.base import EvictionPlan
from pilotlight.policy.ids import WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.placement import (
    PlacementRules,
    Rejection,
    candidates,
    eviction_plan,
)
from pilotlight.policy.plan import Scheme, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRules:
    """Bounds of the choice."""

    placement: PlacementRules = field(default_factory=PlacementRules)
    choice: ChoiceRules = field(default_factory=ChoiceRules)
    """The policy of ``coldstart`` that chooses."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChoice:
    """The scheme, or why there is none."""

    scheme: Scheme | None
    meets_slo: bool = False
    needs_eviction: bool = False
    eviction: EvictionPlan | None = None
    """What would have to go for it, at what loss, by the rule of the cache, which decides."""
    no_worker_ever: bool = False
    """No worker that serves could hold the model even if it were empty: waiting for room does not
    help."""
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
) -> SchemeChoice:
    """Choose how to start a model that has too few instances (ParaServe, algorithm 1).

    Args:
        model: Which is to be started.
        snapshot: The facts. They may be of those workers alone that can be the answer
            (``control.rooms``).
        rules: Bounds of the choice, and its policy.
        excluding: Workers that have just refused, or are left to others.
        fleet: All workers, in numbers; None: the snapshot's are all.
        known: What was learned, and the fetches that run; None: nothing yet, and none.

    1. no worker has room for a stage, and none can be made: no scheme
    2. the policy chooses (``coldstart.chosen``); it may find that what runs would be late
    3. one worker that must make room says what it would evict, at what loss
    """
    choice = rules.choice
    size = min(choice.start.max_stages, model.spec.num_layers)
    least = min(even_stages(model.spec, size), key=model.device_bytes)
    found = candidates(model, least, snapshot, rules.placement, excluding)
    fleet = fleet or Fleet.of(snapshot.workers)
    if not found.fitting and not found.makeable:  # 1
        return _none(model, fleet, found.rejected)
    chosen = choose_with(
        model, (*found.fitting, *found.makeable), snapshot, choice, known or KnownStarts()
    )  # 2
    if chosen is None:
        none = _none(model, fleet, found.rejected)
        return replace(none, reason=f"{none.reason}, or what runs there would be late")
    scheme, eviction = chosen.scheme, None
    if chosen.evicts and scheme.pipeline_size == 1:  # 3
        eviction = eviction_plan(
            model, model.spec.whole, chosen.candidates[0], snapshot, rules.placement
        )
    places = ", ".join(one.worker_id for one in scheme.placements)
    verb = "give" if scheme.pipeline_size > 1 else "gives"
    notes = [
        f"{choice.policy.value}: {places} {verb} the first token in "
        f"{scheme.predicted_ttft_s:.2f} s, the SLO is {model.slo.ttft_ms / 1000:.2f} s"
    ]
    if any(one.failed_here for one in chosen.candidates):
        notes.append("the model has just failed there, and there is no other")
    if any(one.degraded for one in chosen.candidates):
        notes.append("the device is degraded, and there is no other")
    if eviction is not None:
        notes.append(
            f"room must be made first: {eviction.reason}, at a loss of {eviction.loss:.3g}"
        )
    return SchemeChoice(
        scheme=scheme,
        meets_slo=chosen.meets_slo,
        needs_eviction=chosen.evicts,
        eviction=eviction,
        considered=(scheme, *chosen.alternatives),
        rejected=found.rejected,
        reason="; ".join(notes),
    )


def _none(model: Model, fleet: Fleet, rejected: tuple[Rejection, ...]) -> SchemeChoice:
    least = {size: stage_room(model, model.spec.whole, size[0]).least_bytes for size in fleet.sizes}
    hopeless = all(
        memory_bytes < least[granule_bytes, memory_bytes]
        for granule_bytes, memory_bytes in fleet.sizes
    )
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
    return SchemeChoice(scheme=None, no_worker_ever=hopeless, rejected=rejected, reason=reason)


def has_known_room(worker: WorkerFacts) -> bool:
    """Its device's memory says something of what it can hold: one that has failed holds nothing,
    and an engine that has not been up has not said how much there is.
    """
    return worker.health.state is not HealthState.FAILED and (
        worker.engine_up or worker.device.memory_bytes > 0
    )
