"""The cache's books: free bytes are never counted twice."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.cache.books import Books
from pilotlight.cache.grants import Grant, Grants
from pilotlight.cache.testing import hear
from pilotlight.policy.cluster import (
    Copy,
    DeviceKind,
    HeldStage,
    HeldState,
    LinkSpeed,
    NodeFacts,
    OriginKind,
    Tier,
)
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.eviction.base import EvictionCandidate
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.eviction.lru import Lru
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import Digest, GrantId, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.plan import Estimate
from pilotlight.policy.testing import NOW_S, copy, held, model, node, worker

WORKER, NODE = WorkerId("w0"), NodeId("n0")
MEMORY = 1000


def stage(instance: str, size: int, state: HeldState = HeldState.READY) -> HeldStage:
    return held(instance, instance, device_bytes=size, state=state)


def pool(free: int, *copies: Copy) -> NodeFacts:
    return node(pool_bytes=MEMORY, pool_free_bytes=free, copies=copies)


def grant(name: str, instance: str, device: int, host: int = 0) -> Grant:
    return Grant(
        grant_id=GrantId(name),
        instance_id=InstanceId(instance),
        digest=Digest(f"d-{instance}"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=device,
        host_bytes=host,
        expires_s=10.0,
    )


def test_a_grant_counts_until_its_stage_is_held_and_never_twice() -> None:
    books = Books(grants=Grants([grant("g", "a", 300)]))
    assert books.device_free_bytes(worker()) == 700
    assert books.device_free_bytes(worker(held_stages=(stage("a", 280),))) == 700
    assert books.device_free_bytes(worker(held_stages=(stage("a", 280), stage("b", 100)))) == 600


def test_a_cache_that_has_just_begun_to_listen_takes_no_silence_for_an_answer() -> None:
    books, promised = Books(listening_since_s=100.0), grant("g", "a", 300)
    assert not books.would_show(promised, 100.1)
    assert books.would_show(promised, 103.0), "its worker is gone"
    hear(books, worker(), 100.2)
    assert books.would_show(promised, 100.2), "it has reported, and does not hold the stage"


def test_what_was_given_up_is_free_before_the_next_report() -> None:
    books = Books()
    facts = worker(held_stages=(stage("a", 400),))
    hear(books, facts, 0.0)
    books.give_up(WORKER, (InstanceId("a"),))
    hear(books, facts, 0.1)
    assert books.device_free_bytes(facts) == MEMORY, "that report was under way"
    assert not books.on_device(facts, 0.1)


def test_the_grant_of_what_was_given_up_is_over() -> None:
    books = Books(grants=Grants([grant("g", "a", 400), grant("h", "b", 300)]))
    facts = worker(held_stages=(stage("a", 400), stage("b", 300)))
    hear(books, facts, 0.0)
    assert books.give_up(WORKER, (InstanceId("a"),)) == (GrantId("g"),)
    assert books.device_free_bytes(facts) == MEMORY - 300


def test_what_was_given_up_and_is_held_again_takes_room() -> None:
    books = Books()
    facts = worker(held_stages=(stage("a", 400),))
    hear(books, facts, 0.0)
    books.give_up(WORKER, (InstanceId("a"),))
    hear(books, worker(), 0.1)
    hear(books, facts, 0.2)
    assert books.device_free_bytes(facts) == MEMORY - 400


def test_a_copy_was_last_used_by_the_age_that_its_loader_tells() -> None:
    (candidate,) = Books().in_pool(pool(900, replace(copy("a", size_bytes=100), idle_s=7.0)), 50.0)
    assert candidate.last_used_s == 43.0


def test_an_evicted_stage_takes_no_room() -> None:
    assert (
        Books().device_free_bytes(worker(held_stages=(stage("a", 400, HeldState.EVICTED),)))
        == MEMORY
    )


def test_a_fetch_under_way_counts_what_is_still_missing() -> None:
    books = Books(grants=Grants([grant("g", "a", 0, host=500)]))
    assert books.host_free_bytes(pool(1000)) == 500
    assert books.host_free_bytes(pool(800, copy("a", size_bytes=200))) == 500
    assert books.host_free_bytes(pool(500, copy("a", size_bytes=500))) == 500


def test_of_two_copies_either_is_worth_less_than_the_last() -> None:
    """60 bytes: links give 100 a second, the source gave 10 and the disk 20."""
    one = model()
    whole = replace(copy(), parts=tuple(range(6)))
    estimates = with_estimates({}, (learned(one.name, fetch_bytes_per_s=10.0),))
    books = Books(models=registered((one,)), estimates=estimates)
    first = replace(node(copies=(whole,)), dataplane_host="h", dataplane_port=7)
    other = replace(first, node_id=NodeId("n1"), copies=(replace(whole, node_id=NodeId("n1")),))
    hear(books, first, NOW_S)
    assert penalty_s(books, "n0") == 6.0
    hear(books, other, NOW_S)
    assert penalty_s(books, "n0") == penalty_s(books, "n1") == 0.6
    books.drop(NodeId("n1"), (one.digest,))
    assert penalty_s(books, "n0") == 6.0, "before its next report says so"
    hear(books, replace(other, copies=()), NOW_S)
    assert penalty_s(books, "n0") == 6.0
    on_disk = replace(whole, tier=Tier.DISK)
    disk = LinkSpeed(kind=OriginKind.DISK, name="disk", bytes_per_s=20.0)
    hear(books, replace(first, copies=(whole, on_disk), links=(disk,)), NOW_S)
    assert penalty_s(books, "n0") == 3.0


def test_a_stage_comes_back_from_the_nearest_copy() -> None:
    """60 bytes, 1,000 a second onto the device; not in its node's pool. The source gave 10."""
    one = model()
    whole = replace(copy(), parts=tuple(range(6)), node_id=NodeId("n1"))
    estimates = with_estimates({}, (learned(one.name, fetch_bytes_per_s=10.0),))
    books = Books(models=registered((one,)), estimates=estimates)
    facts = worker(held_stages=(held(),))
    hear(books, facts, NOW_S)
    hear(books, node(), NOW_S)

    def stage_penalty_s() -> float:
        (found,) = books.on_device(facts, NOW_S)
        return found.penalty_s

    assert stage_penalty_s() == 6.0
    there = replace(node(copies=(whole,)), node_id=NodeId("n1"))
    hear(books, replace(there, dataplane_host="h", dataplane_port=7), NOW_S)
    assert stage_penalty_s() == 0.6, "the other node's pool"
    hear(books, node(copies=(replace(whole, node_id=NODE),)), NOW_S)
    assert stage_penalty_s() == 0.06, "its own"


def test_policies_hear_of_all_copies_when_loads_turn_out_to_take_another_time() -> None:
    told: list[tuple[str, float]] = []

    class Told(Lru):
        def on_insert(self, candidate: EvictionCandidate, now_s: float) -> None:
            told.append((candidate.subject, candidate.penalty_s))

    books = Books(
        models=registered((model("a"), model("b"))),
        policies=TierPolicies(make=lambda _, __: Told()),
    )
    hear(books, worker(held_stages=(stage("a", 60),)), NOW_S)
    hear(books, node(copies=(copy("a"), copy("b"))), NOW_S)
    told.clear()
    once = with_estimates({}, (learned("b", load_bytes_per_s=10.0),))
    books.hear_estimates(once, NOW_S)
    assert {subject for subject, _ in told} == {"a", "d-a", "d-b"}
    assert dict(told)["a"] == 6.0, "it is expected to take what is usual"
    told.clear()
    books.hear_estimates(with_estimates(once, (learned("b", load_bytes_per_s=11.0),)), NOW_S)
    assert told == [], "about the same"


def learned(name: str, load_bytes_per_s: float = 0.0, fetch_bytes_per_s: float = 0.0) -> Estimate:
    return Estimate(
        model=ModelName(name),
        device_kind=DeviceKind.SIM,
        fetch_bytes_per_s=fetch_bytes_per_s,
        load_bytes_per_s=load_bytes_per_s,
        prefill_s=0.0,
        cold_ttft_s=0.0,
        samples=1,
    )


def penalty_s(books: Books, node_id: str) -> float:
    facts = books.node(NodeId(node_id))
    assert facts is not None
    (found,) = books.in_pool(facts, NOW_S)
    return found.penalty_s


def test_a_loaded_stage_needs_no_room_in_the_pool() -> None:
    books = Books(grants=Grants([grant("g", "a", 300, host=500)]))
    hear(books, worker(held_stages=(stage("a", 300, HeldState.LOADING),)), 0.0)
    assert books.host_free_bytes(pool(1000)) == 500
    hear(books, worker(held_stages=(stage("a", 300),)), 0.1)
    assert books.host_free_bytes(pool(1000)) == 1000


def test_two_instances_of_one_model_share_its_host_copy() -> None:
    books = Books(grants=Grants([grant("g", "a", 0, host=500), grant("h", "a", 0, host=500)]))
    assert books.host_free_bytes(pool(1000)) == 500


def test_stages_of_one_model_on_one_node_each_bring_their_parts() -> None:
    one = replace(model(), digest=Digest("d-a"))
    sizes = one.spec.part_bytes
    front, back = (
        {part: sizes[part] for part in parts} for parts in (range(3), range(3, len(sizes)))
    )
    books = Books(
        models=registered((one,)),
        grants=Grants(
            [
                replace(grant("g", "a", 0, host=sum(front.values())), host_parts=front),
                replace(grant("h", "a", 0, host=sum(back.values())), host_parts=back),
            ]
        ),
    )
    total, of_front = sum(sizes), sum(front.values())
    assert books.host_free_bytes(pool(1000)) == 1000 - total
    there = replace(copy("a", size_bytes=of_front), parts=tuple(front))
    free = books.host_free_bytes(pool(1000 - of_front, there))
    assert free == 1000 - total, "what is there of the one is nothing of the other"
    books.grants[GrantId("h")] = replace(
        books.grants[GrantId("h")], host_parts={**front, **back}, host_bytes=total
    )
    assert books.host_free_bytes(pool(1000)) == 1000 - total, "parts of both come once"


def test_a_silent_worker_is_not_known() -> None:
    books = Books()
    hear(books, worker(), 0.0)
    books.follow(books.roster.check(2.9), 2.9)
    assert books.worker(WORKER) is not None
    books.follow(books.roster.check(3.1), 3.1)
    assert books.worker(WORKER) is None


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200)), max_size=8),
    st.lists(st.integers(1, 200), max_size=6),
)
def test_free_bytes_never_exceed_what_is_left_over(
    grants: list[tuple[int, int]], sizes: list[int]
) -> None:
    stages = [stage(str(index), size) for index, size in enumerate(sizes)]
    books = Books(
        grants=Grants(
            grant(str(i), str(instance), size) for i, (instance, size) in enumerate(grants)
        )
    )
    facts = worker(held_stages=tuple(stages))
    free = books.device_free_bytes(facts)
    assert free <= MEMORY - sum(sizes)
    promised = {str(instance) for instance, _ in grants} - {
        str(index) for index in range(len(sizes))
    }
    assert free <= MEMORY - sum(sizes) - len(promised)
