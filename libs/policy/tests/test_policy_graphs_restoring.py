"""Graphs come back one by one: what is needed first, then by use; who asks goes before."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.graphs.restoring import (
    Restoring,
    Run,
    ask,
    began,
    ended,
    expect,
    next_graph,
    prompt_size,
    rests,
    size_of,
    used,
)

SIZES = (1, 2, 4, 8, 16)


def all_of(restoring: Restoring) -> list[int]:
    """The order in which everything comes back, if nobody asks."""
    order: list[int] = []
    while (size := next_graph(restoring)) is not None:
        order.append(size)
        restoring = ended(began(restoring, size), size, restored=True)
    assert restoring.done
    return order


def test_the_needed_size_comes_first_and_the_rest_by_use() -> None:
    begun = Restoring(sizes=SIZES, uses={4: 10, 1: 99, 16: 10})
    run, begun = ask(begun, 7, kernels_loaded=False)
    assert run is Run.WAIT
    assert all_of(begun) == [8, 1, 4, 16, 2]


def test_what_ran_last_counts_twice_as_much_as_what_ran_before() -> None:
    assert used({}, {8: 3}) == {8: 3}
    assert used({1: 10, 8: 7}, {8: 1, 2: 4}) == {1: 5, 2: 4, 8: 4}
    assert used({1: 10, 8: 7}, {8: 1, 2: 4}, again=True) == {1: 10, 2: 4, 8: 8}
    begun = Restoring(sizes=SIZES, uses=used({16: 10}, {4: 6}))
    assert all_of(begun) == [4, 16, 1, 2, 8]


def test_a_size_that_is_asked_for_goes_before_all_that_nobody_waits_for() -> None:
    one = began(Restoring(sizes=SIZES, uses={1: 9, 2: 8}), 1)
    run, one = ask(one, 16, kernels_loaded=True)
    assert run is Run.LAUNCH_LIST
    run, one = ask(one, 8, kernels_loaded=False)
    assert (run, next_graph(one)) == (Run.WAIT, None), "one at a time"
    one = ended(one, 1, restored=True)
    assert all_of(one) == [16, 8, 2, 4]


def test_what_requests_will_need_comes_behind_what_steps_wait_for() -> None:
    sizes = (*SIZES, prompt_size(16), prompt_size(64))
    one = Restoring(sizes=sizes, uses={16: 99})
    for size in (prompt_size(64), 1, prompt_size(64), 3, prompt_size(512)):
        one = expect(one, size)
    assert one.expected == (prompt_size(64), 1), "each once, if there is one"
    _, one = ask(one, 8, kernels_loaded=False)
    assert all_of(one) == [8, prompt_size(64), 1, 16, 2, 4, prompt_size(16)]
    done = ended(began(one, 1), 1, restored=True)
    again = expect(replace(done, expected=()), 1)
    assert again.expected == (1,), "others wait until it has run"
    assert rests(replace(again, asked=()), set())
    assert 1 not in all_of(again), "it does not come twice"


def test_others_wait_until_what_a_request_needs_has_run() -> None:
    prompt = prompt_size(16)
    one = Restoring(sizes=(*SIZES, prompt))
    assert not rests(one, set()), "nobody is known to need anything"
    one = expect(expect(one, prompt), 1)
    for size in (prompt, 1):
        assert not rests(one, set())
        one = ended(began(one, size), size, restored=True)
    assert rests(one, set())
    assert rests(one, {prompt})
    assert not rests(one, {prompt, 1})
    _, waited = ask(one, 8, kernels_loaded=False)
    assert not rests(waited, set()), "a step waits"
    refused = ended(began(expect(Restoring(sizes=SIZES), 1), 1), 1, restored=False)
    assert not rests(refused, set()), "what there is no memory for never runs"


def test_a_step_of_many_rows_is_no_prompt() -> None:
    one = Restoring(sizes=(1, 2, prompt_size(16), prompt_size(64)))
    assert size_of(one, 3) is None
    assert size_of(one, prompt_size(1)) == prompt_size(16)
    assert size_of(one, prompt_size(17)) == prompt_size(64)
    assert size_of(one, prompt_size(65)) is None


def test_what_is_ready_is_replayed_and_what_is_refused_or_unknown_runs_eagerly() -> None:
    one = ended(began(Restoring(sizes=SIZES), 1), 1, restored=True)
    assert ask(one, 1, kernels_loaded=False) == (Run.REPLAY, one)
    assert ask(one, 17, kernels_loaded=True) == (Run.EAGER, one)
    two = ended(began(one, 2), 2, restored=False)
    assert ask(two, 2, kernels_loaded=True) == (Run.EAGER, two)
    assert 2 not in all_of(two)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 4), (16, 16), (17, None)])
def test_a_step_takes_the_least_graph_that_holds_it(rows: int, size: int | None) -> None:
    assert size_of(Restoring(sizes=SIZES), rows) == size


@given(
    uses=st.dictionaries(st.sampled_from(SIZES), st.integers(0, 5)),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, 20), st.booleans()),
            st.tuples(st.sampled_from(["begin", "end", "refuse"])),
        )
    ),
)
def test_every_graph_comes_back_once_and_nobody_waits_for_two_that_came_later(
    uses: dict[int, int], events: list[tuple[object, ...]]
) -> None:
    one = Restoring(sizes=SIZES, uses=uses)
    begun: list[int] = []
    waiting: list[int] = []
    for what, *rest in events:
        if what == "step":
            rows, loaded = int(str(rest[0])), bool(rest[1])
            run, after = ask(one, rows, kernels_loaded=loaded)
            size = size_of(one, rows)
            assert (run is Run.REPLAY) == (size in one.ready)
            assert (run is Run.EAGER) == (size is None or size in one.refused)
            assert run is not Run.LAUNCH_LIST or loaded
            if run in (Run.WAIT, Run.LAUNCH_LIST) and size is not None and size not in waiting:
                waiting.append(size)
            one = after
        elif what == "begin":
            size = next_graph(one)
            if size is not None:
                open_ = [wanted for wanted in waiting if wanted not in begun]
                assert not open_ or size == open_[0], "who asked first is served first"
                begun.append(size)
                one = began(one, size)
        elif one.building is not None:
            one = ended(one, one.building, restored=what == "end")
    if one.building is not None:
        one = ended(one, one.building, restored=True)
    begun += all_of(one)
    assert sorted(begun) == list(SIZES), "each once"
    assert all_of(replace(one, sizes=())) == []
