from dataclasses import replace
from itertools import combinations

from evicted_copies import copy
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.cluster import Tier
from pilotlight.policy.eviction.base import (
    SPARED_SHOWN,
    EvictionCandidate,
    EvictionRules,
    RoomRequest,
    plan_eviction,
    why_kept,
)
from pilotlight.policy.eviction.choice import POLICIES, make_policy
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.ids import Digest, ModelName, NodeId

NOW_S = 100.0
RULES = EvictionRules(min_residency_s=2.0)


@st.composite
def some_candidates(draw: st.DrawFn) -> list[EvictionCandidate]:
    count = draw(st.integers(0, 7))
    return [
        EvictionCandidate(
            subject=f"s{index}",
            model=ModelName(f"m{index}"),
            digest=Digest(f"d{index}"),
            tier=Tier.DEVICE,
            node_id=NodeId("n"),
            size_bytes=draw(st.integers(1, 50)),
            resident_since_s=NOW_S - draw(st.sampled_from([0.0, 1.9, 2.0, 50.0])),
            last_used_s=NOW_S - draw(st.integers(0, 9)),
            in_flight=draw(st.sampled_from([0, 0, 0, 1])),
            leases=draw(st.sampled_from([0, 0, 0, 1])),
            pinned=draw(st.sampled_from([False, False, True])),
            busy=draw(st.sampled_from([False, False, True])),
        )
        for index in range(count)
    ]


@given(
    some_candidates(),
    st.integers(0, 200),
    st.integers(0, 60),
    st.sets(st.sampled_from(["s0", "s3"])),
)
def test_eviction_is_safe_exact_and_explained(
    candidates: list[EvictionCandidate], need: int, free: int, protected: set[str]
) -> None:
    request = RoomRequest(
        need_bytes=need, free_bytes=free, now_s=NOW_S, protected=frozenset(protected)
    )
    plan = plan_eviction(Lru(), request, candidates, RULES)
    by_subject = {one.subject: one for one in candidates}
    victims = [by_subject[victim.subject] for victim in plan.victims]

    for victim in victims:
        assert victim.in_flight == 0
        assert not victim.pinned
        assert victim.leases == 0
        assert not victim.busy
        assert NOW_S - victim.resident_since_s >= RULES.min_residency_s
        assert victim.subject not in protected

    may_go = [one for one in candidates if why_kept(one, request, RULES) is None]
    possible = any(
        sum(one.size_bytes for one in chosen) >= request.missing_bytes
        for size in range(len(may_go) + 1)
        for chosen in combinations(may_go, size)
    )
    assert plan.enough == possible
    assert plan.reason
    if plan.enough:
        freed = sum(victim.size_bytes for victim in victims)
        assert plan.freed_bytes == freed >= request.missing_bytes
        assert all(freed - victim.size_bytes < request.missing_bytes for victim in victims), (
            "a victim was not needed"
        )
    else:
        assert not victims


@given(some_candidates(), st.integers(1, 200), st.integers(0, 60), st.sampled_from(list(POLICIES)))
def test_no_policy_breaks_a_rule(
    candidates: list[EvictionCandidate], need: int, free: int, name: str
) -> None:
    policy = make_policy(name, 1000)
    request = RoomRequest(need_bytes=need, free_bytes=free, now_s=NOW_S)
    plan = plan_eviction(policy, request, candidates, RULES)
    by_subject = {one.subject: one for one in candidates}
    gone = [by_subject[one.subject] for one in plan.victims]
    assert all(why_kept(one, request, RULES) is None for one in gone)
    assert plan.enough == (free + sum(one.size_bytes for one in gone) >= need)
    stay = {one.model for one in candidates} - {one.model for one in gone}
    for victim in plan.victims:
        assert len(victim.spared) <= SPARED_SHOWN
        assert {one.model for one in victim.spared} <= stay, "what is told to stay stays"


@given(some_candidates(), st.integers(1, 300))
def test_what_is_told_to_be_unpinned_is_enough_and_the_fewest(
    candidates: list[EvictionCandidate], need: int
) -> None:
    request = RoomRequest(need_bytes=need, free_bytes=0, now_s=NOW_S)
    plan = plan_eviction(Lru(), request, candidates, RULES)

    def enough_without(unpinned: tuple[ModelName, ...]) -> bool:
        freed = (
            replace(one, pinned=one.pinned and one.model not in unpinned) for one in candidates
        )
        return plan_eviction(Lru(), request, freed, RULES).enough

    pinned = [one.model for one in candidates if one.pinned]
    least = next(
        (
            size
            for size in range(len(pinned) + 1)
            if any(enough_without(chosen) for chosen in combinations(pinned, size))
        ),
        None,
    )
    if plan.enough or least is None:
        assert plan.unpin == ()
    else:
        assert enough_without(plan.unpin)
        assert len(plan.unpin) == least
        assert all(name in plan.reason for name in plan.unpin)


def test_the_longest_unused_goes_first() -> None:
    def one(subject: str, last_used_s: float) -> EvictionCandidate:
        return replace(copy(subject, size_bytes=10), last_used_s=last_used_s)

    request = RoomRequest(need_bytes=15, free_bytes=0, now_s=NOW_S)
    plan = plan_eviction(
        Lru(), request, [one("new", 90.0), one("old", 10.0), one("middle", 50.0)], RULES
    )
    assert [victim.subject for victim in plan.victims] == ["old", "middle"]
