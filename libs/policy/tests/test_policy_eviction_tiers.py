"""A tier's policy is told of what comes and goes, wherever it lies, once."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import HeldState, NodeFacts, Tier, Transfer, WorkerFacts
from pilotlight.policy.eviction.base import (
    EvictionCandidate,
    EvictionRules,
    RoomRequest,
    plan_eviction,
)
from pilotlight.policy.eviction.candidates import CandidateFacts, in_pool, on_device, registered
from pilotlight.policy.eviction.choice import POLICIES
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import Digest, ModelName, NodeId, WorkerId
from pilotlight.policy.testing import NOW_S, copy, held, model, node, worker

NAMES = ("a", "b", "c", "d")
FACTS = CandidateFacts(now_s=NOW_S, models=registered(model(name) for name in NAMES))


class Recording(Lru):
    """Remembers what is resident by what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.resident: dict[str, int] = {}
        self.inserted: Counter[str] = Counter()
        self.capacity_bytes = 0

    def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
        self.resident[candidate.subject] = candidate.size_bytes
        self.inserted[candidate.subject] += 1
        super().on_insert(candidate, now_s)

    def on_evict(self, subject: str, now_s: float) -> None:
        del self.resident[subject]
        super().on_evict(subject, now_s)

    def resize(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes


def recorded() -> tuple[TierPolicies, Recording, Recording]:
    """Policies, and those of devices and of host pools."""
    policies = TierPolicies(make=lambda _, __: Recording())
    device, host = policies.of(Tier.DEVICE), policies.of(Tier.HOST)
    assert isinstance(device, Recording)
    assert isinstance(host, Recording)
    return policies, device, host


def tell_node(policies: TierPolicies, facts: NodeFacts | None, name: str = "n0") -> None:
    policies.hear_node(
        name, facts, lambda _: in_pool(facts, FACTS) if facts is not None else (), NOW_S
    )


def tell_worker(policies: TierPolicies, facts: WorkerFacts | None, name: str = "w0") -> None:
    policies.hear_worker(
        name, facts, lambda _: on_device(facts, None, FACTS) if facts is not None else (), NOW_S
    )


def test_a_copy_comes_with_the_first_node_and_goes_with_the_last() -> None:
    policies, _, host = recorded()
    both = node(copies=(copy("a"), copy("b")))
    tell_node(policies, both)
    tell_node(policies, both)
    tell_node(policies, replace(node(copies=(copy("a"),)), node_id=NodeId("n1")), "n1")
    assert host.resident == {"d-a": 60, "d-b": 60}
    assert host.inserted["d-b"] == 1, "an equal report says nothing"
    assert host.capacity_bytes == 20_000
    tell_node(policies, None)
    assert (host.resident, host.capacity_bytes) == ({"d-a": 60}, 10_000)
    tell_node(policies, None, "n1")
    assert (host.resident, host.capacity_bytes) == ({}, 0)


def test_what_is_on_its_way_is_not_there_yet() -> None:
    policies, device, host = recorded()
    coming = Transfer(digest=Digest("d-a"), source="s", done_bytes=1, total_bytes=60)
    tell_node(policies, replace(node(copies=(copy("a"),)), transfers=(coming,)))
    tell_worker(policies, worker(held_stages=(held("a", state=HeldState.LOADING),)))
    assert (host.resident, device.resident) == ({}, {})
    tell_node(policies, node(copies=(copy("a"),)))
    tell_worker(policies, worker(held_stages=(held("a", state=HeldState.READY),)))
    assert (list(host.resident), list(device.resident)) == (["d-a"], ["i"])


REPORTS = st.lists(
    st.tuples(
        st.sampled_from(("n0", "n1", "n2")),
        st.none() | st.frozensets(st.sampled_from(NAMES)),
        st.integers(1, 3),
    ),
    max_size=30,
)


@given(REPORTS)
def test_the_policy_knows_what_the_reports_say(
    reports: list[tuple[str, frozenset[str] | None, int]],
) -> None:
    policies, _, recording = recorded()
    truth: dict[str, dict[str, int]] = {}
    for name, holds, size in reports:
        if holds is None:
            tell_node(policies, None, name)
            truth.pop(name, None)
        else:
            facts = node(copies=tuple(copy(one, size_bytes=size) for one in sorted(holds)))
            tell_node(policies, replace(facts, node_id=NodeId(name)), name)
            truth[name] = {f"d-{one}": size for one in holds}
    assert recording.resident.keys() == {one for there in truth.values() for one in there}
    assert recording.capacity_bytes == 10_000 * len(truth)


EVENTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.floats(0.1, 500.0)), max_size=25
)


@pytest.mark.parametrize("name", POLICIES)
@given(EVENTS, st.permutations(NAMES), st.integers(1, 4))
def test_equal_reports_give_scheduler_and_cache_equal_victims(
    name: str, events: list[tuple[str, int, float]], arrangement: list[str], wanted: int
) -> None:
    """The one keeps both tiers, the other that of devices alone."""
    cache, scheduler = TierPolicies(name), TierPolicies(name, (Tier.DEVICE,))
    stages = tuple(held(one, f"i-{one}", device_bytes=100) for one in NAMES)
    here = worker(memory_bytes=400, held_stages=stages)
    there = replace(
        here, held=tuple(held(one, f"i-{one}", device_bytes=100) for one in arrangement)
    )
    for policies, facts in ((cache, here), (scheduler, there)):
        tell_worker(policies, replace(facts, worker_id=WorkerId("w0")))
    tell_node(cache, node(copies=(copy("a"),)))
    now_s = NOW_S
    for asked, count, gap_s in events:
        now_s += gap_s
        for policies in (cache, scheduler):
            policies.on_access(Access(model=ModelName(asked), count=count, at_s=now_s))
    request = RoomRequest(need_bytes=100 * wanted, free_bytes=0, now_s=now_s + 1.0)
    ready = {f"i-{one}": 0.0 for one in NAMES}
    facts = replace(FACTS, now_s=now_s + 1.0, since_s=ready)
    by_cache, by_scheduler = (
        plan_eviction(
            policies.of(Tier.DEVICE), request, on_device(seen, None, facts), EvictionRules()
        ).victims
        for policies, seen in ((cache, here), (scheduler, there))
    )
    assert len(by_cache) == wanted
    assert by_cache == by_scheduler
