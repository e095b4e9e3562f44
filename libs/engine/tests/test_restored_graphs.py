"""Restored graphs, without a device: in which order, what waits, what is refused by name, and what
ends the process.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from restored_rig import (
    DEADLINE_S,
    POOL_BYTES,
    WHOLE,
    RestoredRig,
    places_in,
    plan_of,
    settled,
    unreadable,
)

from pilotlight.engine.cuda.graphs import Kind
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.library import AddressTaken, NativeError, OutOfMemory
from pilotlight.policy.materialized import Trial
from pilotlight.policy.model import Stage


@pytest.fixture
def rig() -> Iterator[RestoredRig]:
    made = RestoredRig()
    yield made
    made.end()


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_graphs_come_by_size_and_each_is_proved_before_its_first_use(rig: RestoredRig) -> None:
    plan = rig.begin()
    rig.device.go()
    settled(rig)
    assert rig.device.built == [1, 2, 4]
    assert (plan.news.ready, plan.news.proved, plan.news.refused) == (3, 0, "")
    step = rig.supply(2)
    assert step is not None
    assert rig.device.launched == [2], "its trial"
    assert plan.news.proved == 1
    assert rig.steps.input == 5.0, "the step's own inputs are back"
    step.graph.replay()
    rig.steps.compute(2)
    assert torch.equal(step.output, rig.steps.output(2))
    assert rig.capture.asked == []


def test_a_size_that_a_step_waits_for_jumps_the_queue(rig: RestoredRig) -> None:
    rig.begin()
    assert rig.device.began[1].wait(DEADLINE_S)
    thread, found = in_thread(lambda: rig.supply(4))
    while rig.plan is not None and 4 not in rig.plan._order.asked:
        pass
    rig.device.go(1, 4)
    thread.join(DEADLINE_S)
    assert found[0] is not None
    assert rig.device.built == [1, 4]


def test_a_step_waits_no_longer_than_it_may_and_then_runs_eagerly() -> None:
    rig = RestoredRig(wait_s=0.01)
    rig.begin()
    assert rig.supply(2) is None
    assert rig.capture.asked == [], "nothing is captured that comes back"
    rig.device.go()
    settled(rig)
    assert rig.supply(2) is not None
    rig.end()


def test_other_steps_are_captured(rig: RestoredRig) -> None:
    rig.begin()
    assert rig.supply(2, Stage(0, 2)) is None
    assert rig.supply(16, prompt=True) is None
    assert rig.supply(8) is None
    assert rig.capture.asked == [Kind(Stage(0, 2), 2), Kind(WHOLE, 16, True), Kind(WHOLE, 8)]


def test_no_more_kernels_are_loaded_ahead_once_the_stage_has_its_steps(rig: RestoredRig) -> None:
    begun, loading = threading.Event(), threading.Event()

    def load(size: int) -> None:
        rig.device.loaded.append(size)
        loading.set()
        assert begun.wait(DEADLINE_S)

    rig.device.load = load
    rig.device.go()
    rig.begin(before=lambda: loading.wait(DEADLINE_S))
    begun.set()
    settled(rig)
    assert rig.device.loaded == [1]
    assert rig.device.built == [1, 2, 4]


def test_kernels_that_there_is_no_memory_for_yet_are_loaded_when_their_graph_is_made(
    rig: RestoredRig,
) -> None:
    def load(size: int) -> None:
        raise OutOfMemory(2, "full")

    rig.device.load = load
    rig.device.go()
    plan = rig.begin()
    settled(rig)
    assert (rig.device.built, plan.news.refused) == ([1, 2, 4], "")


def test_a_kernel_that_the_driver_refuses_ahead_ends_the_process(rig: RestoredRig) -> None:
    refused = threading.Event()

    def load(size: int) -> None:
        refused.set()
        raise NativeError(200, "invalid image")

    rig.device.load = load
    plan = rig.begin(before=lambda: refused.wait(DEADLINE_S))
    settled(rig)
    assert plan.news.refused == "driver"
    with pytest.raises(RestoreFailed, match="invalid image"):
        rig.supply(1)


def test_an_address_of_nothing_refuses_what_is_not_made_yet(rig: RestoredRig) -> None:
    rig.device.nowhere[4] = "at 5"
    plan = rig.begin()
    rig.device.go()
    settled(rig)
    assert rig.device.built == [1, 2]
    assert plan.news.refused == "addresses"
    assert rig.supply(2) is not None
    assert rig.supply(4) is None
    assert rig.capture.asked == [Kind(WHOLE, 4)]


def opened_with(error: Exception) -> Any:
    def change(rig: RestoredRig) -> None:
        def fail() -> None:
            raise error

        rig.open = fail

    return change


def elsewhere(name: str) -> Any:
    def change(rig: RestoredRig) -> None:
        places = places_in({**rig.layout.addresses, name: 1})
        rig.layout = replace(rig.layout, places=places)

    return change


REFUSALS: dict[str, tuple[Any, str]] = {
    "slot": (lambda rig: setattr(rig, "slot", 4), "slot"),
    "a place": (elsewhere("metadata"), "metadata"),
    "the logits": (elsewhere("logits"), "logits"),
    "a place that is not here": (elsewhere("prompt"), "places"),
    "no trials": (lambda rig: setattr(rig.steps, "has_trials", False), "steps"),
    "a smaller pool": (lambda rig: setattr(rig.pool, "mapped_bytes", POOL_BYTES - 1), "pool"),
    "bytes": (unreadable, "graphs_digest"),
    "the archive": (opened_with(NativeError(-1, "cut off")), "archive"),
    "an address of nothing": (
        lambda rig: rig.device.nowhere.update({1: "at 5", 2: "at 5"}),
        "addresses",
    ),
    "another arena": (opened_with(AddressTaken(-2, "at 5")), "arena_address"),
    "a bug": (opened_with(ZeroDivisionError("oh")), "thread"),
    "sizes": (lambda rig: setattr(rig.device, "tags", (1, 2)), "sizes"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.filterwarnings(
    "ignore:(?s).*ZeroDivisionError:pytest.PytestUnhandledThreadExceptionWarning"
)
def test_what_does_not_fit_is_refused_by_name_before_the_driver_and_captured(
    rig: RestoredRig, name: str
) -> None:
    change, field = REFUSALS[name]
    change(rig)
    plan = rig.begin()
    assert rig.supply(2) is None
    assert rig.capture.asked == [Kind(WHOLE, 2)]
    assert (plan.news.refused, plan.news.ready) == (field, 0), plan.news.message
    assert plan.news.message
    assert rig.device.built == []


def test_a_graph_that_the_driver_refuses_ends_the_process_with_the_next_step(
    rig: RestoredRig,
) -> None:
    rig.device.fails[2] = NativeError(700, "illegal address")
    plan = rig.begin()
    rig.device.go()
    settled(rig)
    assert plan.news.refused == "driver"
    with pytest.raises(RestoreFailed, match="illegal address"):
        rig.supply(1)


def test_a_graph_that_there_is_no_memory_for_is_captured_and_the_others_come(
    rig: RestoredRig,
) -> None:
    rig.device.fails[2] = OutOfMemory(2, "full")
    plan = rig.begin()
    rig.device.go()
    settled(rig)
    assert (rig.device.built, plan.news.refused) == ([1, 4], "")
    assert rig.supply(2) is None
    assert rig.capture.asked == [Kind(WHOLE, 2)]
    assert rig.supply(4) is not None


def test_a_graph_that_gives_other_bits_for_its_trial_ends_the_process(rig: RestoredRig) -> None:
    trials = tuple(
        Trial(rows=one.rows, digest="0" * 64) if one.rows == 4 else one for one in rig.layout.trials
    )
    rig.layout = replace(rig.layout, trials=trials)
    plan = rig.begin()
    rig.device.go()
    assert rig.supply(2) is not None
    with pytest.raises(RestoreFailed, match=r"4 rows gave .* and 0000000000000000 was recorded"):
        rig.supply(4)
    assert plan.news.proved == 1


def test_all_are_proved_at_once_in_a_pool_of_nonsense(rig: RestoredRig) -> None:
    plan = rig.begin()
    rig.device.go()
    poisoned: list[bool] = []

    def through(rows: int) -> torch.Tensor:
        poisoned.append(bool((rig.steps.pool == 255).all()))
        assert rig.supply(rows) is not None
        return rig.steps.output(rows)

    rig.steps.through = through
    plan.prove()
    assert poisoned == [True] * 3
    assert plan.news.proved == 3


def test_closing_waits_for_the_graph_that_is_made_and_makes_no_other(rig: RestoredRig) -> None:
    plan = rig.begin()
    assert rig.device.began[1].wait(DEADLINE_S)
    thread, _ = in_thread(plan.close)
    while not plan._closing:
        pass
    rig.device.go(1)
    thread.join(DEADLINE_S)
    assert rig.device.built == [1]
    assert rig.device.closed
    assert rig.capture.closed


def test_the_archive_is_read_before_the_stage_has_its_steps(rig: RestoredRig) -> None:
    all_loaded = threading.Event()

    def load(size: int) -> None:
        rig.device.loaded.append(size)
        if len(rig.device.loaded) == 3:
            all_loaded.set()

    rig.device.go()
    rig.device.load = load
    plan = rig.begin(before=lambda: (all_loaded.wait(DEADLINE_S), *rig.device.checked))
    assert rig.told_before == (True,), "there is memory yet to come that graphs may name"
    settled(rig)
    assert rig.device.loaded == [1, 2, 4], "in the order in which they come"
    assert rig.device.checked == [1, 2, 4], "each before it is made"
    took_ms = plan.took.steps
    assert {"read", "open", "load", "reserved", "begun"} < took_ms.keys()
    since = [took_ms[step] for step in ("begun", "first", "all")]
    assert since == sorted(since)
    assert (took_ms["first_nodes"], took_ms["all_nodes"]) == (2.0, 6.0)


def test_a_stage_that_never_has_steps_ends_the_thread(rig: RestoredRig) -> None:
    rig.begin(before=lambda: plan_of(rig).close())
    settled(rig)
    assert rig.device.built == []


def test_what_was_used_most_comes_first(rig: RestoredRig) -> None:
    rig.uses = {4: 100, 2: 3, 512: 9}
    rig.begin()
    rig.device.go()
    settled(rig)
    assert rig.device.built == [4, 2, 1]


def test_steps_of_each_size_are_counted(rig: RestoredRig) -> None:
    plan = rig.begin()
    assert plan.uses == {}
    rig.graph_set.uses = {
        Kind(WHOLE, 4): 7,
        Kind(WHOLE, 2, prompt=True): 5,
        Kind(Stage(0, 2), 1): 3,
        Kind(WHOLE, 512): 1,
    }
    assert plan.uses == {4: 7}
