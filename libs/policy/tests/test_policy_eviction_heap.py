import heapq
import random

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.eviction.heap import LazyHeap

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "look"]), st.integers(0, 9), st.integers(0, 30).map(float)
    ),
    max_size=200,
)


@given(STEPS)
def test_a_lazy_heap_gives_what_sorting_gives(steps: list[tuple[str, int, float]]) -> None:
    heap, plain = LazyHeap(), dict[str, tuple[float, float]]()
    for kind, number, score in steps:
        subject = f"s{number}"
        if kind == "put":
            heap.put(subject, (score, 0.0))
            plain[subject] = (score, 0.0)
        elif kind == "remove":
            heap.remove(subject)
            plain.pop(subject, None)
        else:
            wanted = sorted(plain, key=lambda one: (plain[one], one))
            looking = heap.ascending()
            assert [one for one, _ in zip(looking, range(number), strict=False)] == wanted[:number]
            looking.close()
        assert len(heap) == len(plain)
        assert heap.least() == min(plain.values(), default=None)


def test_an_entry_that_is_worth_more_by_now_sinks() -> None:
    heap = LazyHeap()
    for place, subject in enumerate("abcd"):
        heap.put(subject, (float(place), 0.0))
    of_now = {"a": (2.5, 0.0), "b": (0.5, 0.0), "c": (2.0, 0.0), "d": (9.0, 0.0)}
    assert list(heap.ascending(of_now.__getitem__)) == ["b", "c", "a", "d"]
    assert heap.priority("d") == (9.0, 0.0)
    assert list(heap.ascending()) == ["b", "c", "a", "d"]


def test_stale_entries_do_not_pile_up() -> None:
    heap, rng = LazyHeap(), random.Random(0)
    for _ in range(20_000):
        heap.put(f"s{rng.randrange(100)}", (rng.random(), 0.0))
    kept = heap._heap
    assert len(kept) <= 2 * 100 + 65
    assert kept[0] == heapq.nsmallest(1, kept)[0]
