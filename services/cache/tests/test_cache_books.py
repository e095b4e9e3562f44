"""The cache's books: free bytes are never counted twice."""

from facts import MEMORY, NODE, WORKER, copy, held, node, worker
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.cache.books import Books, Grant
from pilotlight.policy.types import Digest, GrantId, HeldState, InstanceId


def grant(name: str, instance: str, device: int, host: int = 0) -> Grant:
    return Grant(
        grant_id=GrantId(name),
        instance_id=InstanceId(instance),
        digest=Digest(f"digest-{instance}"),
        worker_id=WORKER,
        node_id=NODE,
        device_bytes=device,
        host_bytes=host,
        expires_s=10.0,
    )


def test_a_grant_counts_until_its_stage_is_held_and_never_twice() -> None:
    books = Books(grants={GrantId("g"): grant("g", "a", 300)})
    assert books.device_free_bytes(worker()) == 700
    assert books.device_free_bytes(worker(held("a", 280))) == 700
    assert books.device_free_bytes(worker(held("a", 280), held("b", 100))) == 600


def test_what_was_given_up_is_free_before_the_next_report() -> None:
    books = Books()
    facts = worker(held("a", 400))
    books.hear_worker(facts, 0.0)
    books.give_up((InstanceId("a"),))
    assert books.device_free_bytes(facts) == MEMORY
    assert not books.on_device(facts, 0.0)


def test_an_evicted_stage_takes_no_room() -> None:
    assert Books().device_free_bytes(worker(held("a", 400, HeldState.EVICTED))) == MEMORY


def test_a_fetch_under_way_counts_what_is_still_missing() -> None:
    books = Books(grants={GrantId("g"): grant("g", "a", 0, host=500)})
    assert books.host_free_bytes(node(1000)) == 500
    assert books.host_free_bytes(node(800, copy("digest-a", 200))) == 500
    assert books.host_free_bytes(node(500, copy("digest-a", 500))) == 500


def test_two_instances_of_one_model_share_its_host_copy() -> None:
    books = Books(grants={GrantId("g"): grant("g", "a", 0, host=500), GrantId("h"): grant("h", "a", 0, host=500)})
    assert books.host_free_bytes(node(1000)) == 500


def test_a_silent_worker_is_not_known() -> None:
    books = Books()
    books.hear_worker(worker(), 0.0)
    assert books.worker(WORKER, 2.9) is not None
    assert books.worker(WORKER, 3.1) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 200)), max_size=8), st.lists(st.integers(1, 200), max_size=6))
def test_free_bytes_never_exceed_what_is_left_over(grants: list[tuple[int, int]], sizes: list[int]) -> None:
    stages = [held(str(index), size) for index, size in enumerate(sizes)]
    books = Books(grants={GrantId(str(i)): grant(str(i), str(instance), size) for i, (instance, size) in enumerate(grants)})
    facts = worker(*stages)
    free = books.device_free_bytes(facts)
    assert free <= MEMORY - sum(sizes)
    promised = {str(instance) for instance, _ in grants} - {str(index) for index in range(len(sizes))}
    assert free <= MEMORY - sum(sizes) - len(promised)
