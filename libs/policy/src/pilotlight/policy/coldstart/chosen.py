"""A policy's choice for one start, from the facts that control has, in the form that it orders."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.bursts import choose_burst, for_all
from pilotlight.policy.coldstart.contention import FetchBooks
from pilotlight.policy.coldstart.facts import ClusterFacts, Usual, servers_for
from pilotlight.policy.coldstart.policies import CHOICES, StartPolicy
from pilotlight.policy.coldstart.servers import (
    Assigned,
    Server,
    StageChoice,
    StartRequest,
    StartRules,
    StartScheme,
    missing_parts,
    predict,
)
from pilotlight.policy.coldstart.timings import Timings
from pilotlight.policy.cost import group_ttft_s, stage_room, transfer_s
from pilotlight.policy.model import Model
from pilotlight.policy.phase import PhaseName
from pilotlight.policy.placement import Candidate
from pilotlight.policy.plan import Placement, Scheme, Snapshot

ALTERNATIVES = 1
"""Other workers that a decision is shown beside: each is predicted for every start."""
SEARCH_STEPS = 2000
"""Of ``pilotlight``, for one start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """Which policy chooses, and within which bounds."""

    policy: StartPolicy = StartPolicy.PILOTLIGHT
    start: StartRules = field(
        default_factory=lambda: StartRules(max_stages=1, max_steps=SEARCH_STEPS)
    )
    usual: Usual = field(default_factory=Usual)
    bare: bool = False
    """Every start makes its process anew, as on ParaServe's platform; else workers are up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStarts:
    """What a choice knows beside the snapshot."""

    timings: Timings = field(default_factory=Timings)
    fetches: FetchBooks = field(default_factory=FetchBooks)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice."""

    scheme: Scheme
    meets_slo: bool
    evicts: bool
    """Some worker has not enough free room: what is idle there must go."""
    candidates: tuple[Candidate, ...]
    """The workers of its stages."""
    alternatives: tuple[Scheme, ...] = ()
    """What it was compared with, for whoever asks why: with fewer stages, and other workers."""
    instances: int = 1
    """That its group is to become."""


def choose_with(
    model: Model,
    found: Sequence[Candidate],
    snapshot: Snapshot,
    rules: ChoiceRules,
    known: KnownStarts,
    instances: int = 1,
    *,
    whole: bool = True,
) -> Chosen | None:
    """What a policy chooses; None where running fetches allow nothing, or no worker has the room.

    1. workers on which the model has just failed, or whose device is degraded, are asked only when
       the others give no scheme
    2. then a scheme that meets the SLO, then one in free room over one for which something is
       evicted
    3. a start of ``pilotlight`` that is late by its waiting gets one worker. More would hold links
       and devices that other starts need to be in time, most of them when fewest are free: an
       overload that feeds itself. Only an SLO that no start can meet gets the least TTFT of any s,
       in free room and until it has passed
    4. of a burst that wants several instances, the first group of those in which all of it meets
       the SLO in free room, if groups do that which are no single workers (``bursts``). A burst
       that is late anyhow gets one worker after the other
    5. of several requests that wait, the last one is to be in time, too, where free room allows it
       (``bursts.for_all``): the workers of an instance compute one prompt after the other

    Args:
        model: To be started.
        found: Workers that may take a stage, with what is free and what eviction could free.
        snapshot: Nodes, and what waits.
        rules: The policy.
        known: Timings, and the fetches that run.
        instances: How many more the model is to have, this one among them.
        whole: As in ``StartRequest``.
    """
    tiers = (
        [one for one in found if not one.failed_here and not one.degraded],
        [one for one in found if not one.failed_here],
        list(found),
    )
    asked, rules = -1, _with_hops(rules, known.timings)
    is_ours = rules.policy is StartPolicy.PILOTLIGHT
    waiting = sum(one.waiting for one in snapshot.demand if one.model == model.name)
    for tier in tiers:  # 1
        if len(tier) == asked:
            continue
        asked = len(tier)
        request, servers = _asked(model, tier, snapshot, rules, known)
        request = replace(request, whole=whole)
        if (group := _of_burst(request, servers, tier, rules, instances)) is not None:  # 4
            return group
        sooner = for_all(request, servers, waiting, instances) if is_ours else None
        best = sooner and _choose(sooner, _as_free(servers, tier), tier, rules)  # 5
        if best is None or not best.meets_slo:
            best = _in_room(request, servers, tier, rules)
        if best is not None and not best.meets_slo and is_ours:
            best = _when_late(request, servers, tier, rules, best)  # 3
        if best is not None:
            return best
    return None


def _with_hops(rules: ChoiceRules, timings: Timings) -> ChoiceRules:
    """Rules with t_n as it was learned: choices are made by its mean over all pairs of nodes."""
    if not timings.hops:
        return rules
    return replace(rules, start=replace(rules.start, hop_s=timings.ring_hop_s(())))


def _of_burst(
    request: StartRequest,
    servers: Sequence[Server],
    tier: Sequence[Candidate],
    rules: ChoiceRules,
    instances: int,
) -> Chosen | None:
    """Rule 4; None where single starts do as well, or groups do not help.

    Args:
        request: What is to be started.
        servers: Where it could go.
        tier: The same as candidates.
        rules: The policy.
        instances: How many more there are to be.
    """
    late = request.waited_s * 1000 >= request.model.slo.ttft_ms
    groups = rules.policy is StartPolicy.PILOTLIGHT and rules.start.max_stages > 1 and request.whole
    if instances < 2 or late or not groups:
        return None
    free = _as_free(servers, tier)
    burst = choose_burst(request, free, rules.start, instances, CHOICES[rules.policy])
    if burst.instances < instances or burst.missing_slo > 0:
        return None
    size = burst.sizes[0]
    if size == 1:
        return None
    found = _choose(replace(request, instances=size), free, tier, rules)
    return replace(found, instances=size) if found is not None else None


def _as_free(servers: Sequence[Server], tier: Sequence[Candidate]) -> list[Server]:
    """Servers with their free room alone."""
    return [
        replace(server, free_bytes=one.free_bytes) if one.evictable_bytes > 0 else server
        for server, one in zip(servers, tier, strict=True)
    ]


def is_late(model: Model, waited_s: float) -> bool:
    """Whether a request has waited for longer than its SLO, so that no start meets that."""
    return waited_s * 1000 > model.slo.ttft_ms


def _in_room(
    request: StartRequest, servers: Sequence[Server], tier: Sequence[Candidate], rules: ChoiceRules
) -> Chosen | None:
    """Rule 2."""
    free = _choose(request, _as_free(servers, tier), tier, rules)
    # Of a request that is late by its waiting alone no choice is in time, with eviction or without.
    if free is not None and (free.meets_slo or is_late(request.model, request.waited_s)):
        return free
    made = None
    least_bytes = {
        size: stage_room(request.model, request.model.spec.whole, size).least_bytes
        for size in {one.worker.device.granule_bytes for one in tier}
    }
    if any(
        one.evictable_bytes > 0 and one.free_bytes < least_bytes[one.worker.device.granule_bytes]
        for one in tier
    ):
        made = _choose(request, servers, tier, rules)
    return made if made is not None and (free is None or made.meets_slo) else free


def _when_late(
    request: StartRequest,
    servers: Sequence[Server],
    tier: Sequence[Candidate],
    rules: ChoiceRules,
    best: Chosen,
) -> Chosen:
    """Rule 3, for the best choice of any number of stages.

    Args:
        request: What is to be started.
        servers: Where it could go.
        tier: The same as candidates.
        rules: The policy.
        best: The least TTFT; it misses the SLO.
    """
    size, waited_s = best.scheme.pipeline_size, request.waited_s
    if size == 1 or waited_s <= 0:
        return best
    if not best.evicts and waited_s * 1000 < request.model.slo.ttft_ms:
        as_new = _in_room(replace(request, waited_s=0.0), servers, tier, rules)
        if as_new is None or not as_new.meets_slo:
            return best
    alone = replace(rules, start=replace(rules.start, max_stages=1))
    return _in_room(request, servers, tier, alone) or best


def _asked(
    model: Model,
    found: Sequence[Candidate],
    snapshot: Snapshot,
    rules: ChoiceRules,
    known: KnownStarts,
) -> tuple[StartRequest, Sequence[Server]]:
    """The question to a policy: what is to be started, and where it could go.

    Its prompt is that of the oldest request that waits, where that is known.
    """
    waiting = (one for one in snapshot.demand if one.model == model.name)
    oldest = max(waiting, key=lambda one: one.oldest_age_s, default=None)
    waited_s = oldest.oldest_age_s if oldest is not None else 0.0
    usual = rules.usual
    if oldest is not None and oldest.prompt_tokens > 0:
        usual = replace(usual, prompt_tokens=oldest.prompt_tokens)
    facts = ClusterFacts(
        nodes={one.node_id: one for one in snapshot.nodes},
        timings=known.timings,
        usual=usual,
        bare=rules.bare,
    )
    servers = servers_for(model, found, facts)
    links = {link for server in servers for offer in server.offers for link in offer.links}
    kinds, timings = {one.worker.device.kind for one in found}, known.timings
    request = StartRequest(
        model=model,
        waited_s=waited_s,
        books=known.fetches.forward(sorted(links), snapshot.now_s),
        now_s=snapshot.now_s,
        overhead_s=max(timings.overhead_s(kind) for kind in DeviceKind),
        restores=any(timings.restores(model.name, kind) for kind in kinds),
        timings=timings,
    )
    return request, servers


def _choose(
    request: StartRequest,
    servers: Sequence[Server],
    found: Sequence[Candidate],
    rules: ChoiceRules,
) -> Chosen | None:
    model = request.model
    scheme = CHOICES[rules.policy](request, servers, rules.start)
    if scheme is None:
        return None
    by_id = {one.worker.worker_id: one for one in found}
    used = tuple(by_id[stage.worker_id] for stage in scheme.stages)
    placements: list[Placement] = []
    for stage, candidate in zip(scheme.stages, used, strict=True):
        device_bytes = stage.device_bytes
        if scheme.size == 1:
            room = stage_room(model, model.spec.whole, candidate.worker.device.granule_bytes)
            device_bytes = room.granted_bytes(candidate.free_bytes)
        placements.append(_placement(stage, device_bytes))
    return Chosen(
        scheme=_scheme(request, scheme, placements, rules),
        meets_slo=scheme.meets_slo,
        evicts=any(
            place.device_bytes > candidate.free_bytes
            for place, candidate in zip(placements, used, strict=True)
        ),
        candidates=used,
        alternatives=_alternatives(request, servers, rules, scheme),
    )


def _alternatives(
    request: StartRequest, servers: Sequence[Server], rules: ChoiceRules, chosen: StartScheme
) -> tuple[Scheme, ...]:
    """What a decision is shown beside.

    1. with more than one stage: the best with fewer, which was not good enough
    2. the whole model on other workers: those that would have their bytes the soonest if they
       fetched alone. Beside a choice in free room those that have it free, too
    """
    others: list[StartScheme] = []
    if chosen.size > 1:  # 1
        fewer = replace(rules.start, max_stages=chosen.size - 1)
        found = CHOICES[rules.policy](request, servers, fewer)
        others += [found] if found is not None else []
    taken = {stage.worker_id for stage in chosen.stages}
    model, whole = request.model, request.model.spec.whole
    soonest: list[tuple[float, str, Assigned]] = []
    for server in servers:  # 2
        if server.worker_id in taken:
            continue
        if server.free_bytes < stage_room(model, whole, server.granule_bytes).least_bytes:
            continue
        missing = missing_parts(model, whole, server)
        size = sum(model.spec.part_bytes[part] for part in missing)
        offers = [one for one in server.offers if one.has(missing)] if missing else []
        if missing and not offers:
            continue
        offer = max(offers, key=lambda one: one.bytes_per_s, default=None)
        alone_s = transfer_s(size, offer.bytes_per_s) if offer is not None else 0.0
        one = Assigned(server=server, stage=whole, full=True, offer=offer)
        soonest.append((alone_s, server.worker_id, one))
    soonest.sort(key=lambda one: one[:2])
    others += [predict(request, (one,), rules.start) for _, _, one in soonest[:ALTERNATIVES]]
    return tuple(
        _scheme(
            request, one, [_placement(stage, stage.device_bytes) for stage in one.stages], rules
        )
        for one in others
    )


def _placement(stage: StageChoice, device_bytes: int) -> Placement:
    late = stage.fetch_deadline_s == math.inf
    return Placement(
        worker_id=stage.worker_id,
        node_id=stage.node_id,
        stage=stage.stage,
        device_bytes=device_bytes,
        source=stage.source,
        fetch_bytes=stage.fetch_bytes,
        fetch_deadline_s=None if late else stage.fetch_deadline_s,
    )


def _scheme(
    request: StartRequest,
    scheme: StartScheme,
    placements: Sequence[Placement],
    rules: ChoiceRules,
) -> Scheme:
    """What is said of a choice: it was made by bounds, and is told by what is expected."""
    expected = request.books.expected_s(scheme.newcomers(""), request.now_s)
    fetches_s = iter(expected)
    costs = [
        replace(stage.cost, fetch_s=next(fetches_s) if stage.fetch_bytes > 0 else 0.0)
        for stage in scheme.stages
    ]
    began = PhaseName.RESTORE if request.restores else PhaseName.INIT
    hop_s, more_s = rules.start.hop_s, 0.0
    if request.timings.hops and scheme.size > 1:
        hop_s = request.timings.ring_hop_s([stage.node_id for stage in scheme.stages])
        more_s = (hop_s - rules.start.hop_s) * scheme.size
    return Scheme(
        pipeline_size=scheme.size,
        full_memory_workers=scheme.full_memory_workers,
        placements=tuple(placements),
        predicted_ttft_s=group_ttft_s(costs, request.spent_s, hop_s),
        predicted_tpot_s=scheme.tpot_s + more_s,
        predicted_phase_s={
            PhaseName.FETCH: max(one.fetch_s for one in costs),
            PhaseName.LOAD: max(one.load_s for one in costs),
            began: max(one.init_s for one in costs),
            PhaseName.PREFILL: sum(one.prefill_s for one in costs),
        },
        refusal=scheme.refusal,
    )
