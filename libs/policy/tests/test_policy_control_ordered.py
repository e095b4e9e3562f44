"""A sorted sequence that shares runs, beside a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.control.ordered import RUN, Ordered

Names = st.sets(st.integers(0, 5000).map(lambda one: f"w{one:05}"), max_size=40)


@given(st.integers(0, 6 * RUN), st.lists(st.tuples(Names, Names), max_size=12))
def test_it_has_what_a_sorted_list_has(size: int, steps: list[tuple[set[str], set[str]]]) -> None:
    expected = {f"w{7 * one:05}" for one in range(size)}
    ordered = first = Ordered(expected)
    before = sorted(expected)
    for gone, come in steps:
        left, joined = gone & expected, come - (expected - gone)
        ordered = ordered.changed(sorted(left), sorted(joined))
        expected = (expected - left) | joined
        assert list(ordered) == sorted(expected)
        assert list(reversed(ordered)) == sorted(expected, reverse=True)
        assert len(ordered) == len(expected)
        assert ordered == Ordered(expected), "however its runs are cut"
    assert list(first) == before, "what was made from it is another one"


def test_a_run_that_loses_all_that_it_has_is_gone() -> None:
    ordered = Ordered(f"w{one:05}" for one in range(30 * RUN))
    whole = [f"w{one:05}" for one in range(RUN, 2 * RUN)]
    ordered = ordered.changed([*whole, "w00000", f"w{2 * RUN:05}"], ["w99999"])
    assert len(list(ordered)) == len(ordered) == 29 * RUN - 1
    assert ordered.changed([], whole) == Ordered({*ordered, *whole})


def test_what_changes_again_and_again_does_not_fall_to_pieces() -> None:
    ordered = Ordered((float(one), "x") for one in range(40 * RUN))
    for one in range(40 * RUN - 40):
        ordered = ordered.changed([(float(one), "x")], [])
        if one % 3 == 0:
            ordered = ordered.changed([], [(float(one) + 1e6, "x")])
    assert len(ordered) == len(list(ordered))
    assert list(ordered) == sorted(ordered)
