"""Steps whose graph is still being made, launched kernel by kernel: which ones, what each has to
prove, and what follows it. Without a device.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from restored_rig import DEADLINE_S, WHOLE, RestoredRig, plan_of, settled

from pilotlight.engine.cuda.graphs import GraphSet, GraphStep, Kind
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.library import NativeError, OutOfMemory
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.materialized import Trial


@pytest.fixture
def rig() -> Iterator[RestoredRig]:
    made = RestoredRig(launch_lists=True)
    yield made
    made.end()


def all_loaded(rig: RestoredRig) -> Any:
    """Kernels come while the stage gets its memory: this waits for those of every size."""
    there, load = threading.Event(), rig.device.load

    def loading(size: int) -> None:
        load(size)
        if len(rig.device.loaded) == len(rig.device.tags):
            there.set()

    rig.device.load = loading
    return lambda: there.wait(DEADLINE_S)


def test_a_step_whose_kernels_are_loaded_does_not_wait_for_its_graph(rig: RestoredRig) -> None:
    plan = rig.begin(before=all_loaded(rig))
    assert rig.device.began[1].wait(DEADLINE_S), "another one is being made"
    step = rig.supply(4)
    assert step is not None
    assert step.once
    assert (rig.device.listed, rig.device.launched) == ([4], []), "its trial"
    assert rig.steps.input == 5.0, "the step's own inputs are back"
    step.graph.replay()
    rig.steps.compute(4)
    assert torch.equal(step.output, rig.steps.output(4))
    assert rig.device.listed == [4, 4]
    assert (plan.news.ready, plan.news.proved, plan.lists.proved) == (0, 0, {4})
    rig.device.go()
    settled(rig)
    assert rig.device.built == [1, 4, 2], "it has jumped the queue"


def test_its_graph_runs_from_the_next_step_on_and_is_proved_itself(rig: RestoredRig) -> None:
    plan = rig.begin(before=all_loaded(rig))
    for turn in range(2):
        assert rig.supply(4) is not None, turn
    assert rig.device.listed == [4], "one trial, whatever runs it"
    rig.device.go()
    settled(rig)
    step = rig.supply(4)
    assert step is not None
    assert not step.once
    step.graph.replay()
    assert (rig.device.listed, rig.device.launched) == ([4], [4, 4])
    assert plan.news.proved == 1


def test_what_is_made_next_has_its_kernels_first(rig: RestoredRig) -> None:
    """None was loaded ahead: a step waits for its kernels, and no longer."""
    load = rig.device.load

    def ahead(size: int) -> None:
        raise OutOfMemory(2, "full")

    rig.device.load = ahead
    rig.begin(before=lambda: settled_loads(rig))
    rig.device.load = load
    assert rig.device.began[1].wait(DEADLINE_S)
    rig.device.go(1)
    step = rig.supply(4)
    assert step is not None
    assert step.once
    assert 4 not in rig.device.built
    rig.device.go()
    settled(rig)
    assert rig.device.loaded.count(4) == 1


def settled_loads(rig: RestoredRig) -> None:
    """The archive has been read, and nothing could be loaded."""
    while "load" not in plan_of(rig).took.steps:
        pass


def test_without_lists_a_step_waits(rig: RestoredRig) -> None:
    other = RestoredRig(wait_s=0.01)
    other.begin(before=all_loaded(other))
    assert other.supply(4) is None
    assert other.device.listed == []
    other.end()


def test_a_list_that_no_launch_takes_waits_for_its_graph(rig: RestoredRig) -> None:
    rig.device.unlisted = {2}
    rig.begin(before=all_loaded(rig))
    rig.device.go()
    settled(rig)
    step = rig.supply(2)
    assert step is not None
    assert not step.once
    assert rig.device.listed == []


def test_a_list_that_gives_other_bits_ends_the_process(rig: RestoredRig) -> None:
    trials = tuple(
        Trial(rows=one.rows, digest="0" * 64) if one.rows == 4 else one for one in rig.layout.trials
    )
    rig.layout = replace(rig.layout, trials=trials)
    plan = rig.begin(before=all_loaded(rig))
    with pytest.raises(RestoreFailed, match=r"launch list of 4 rows gave .* 0000000000000000 was"):
        rig.supply(4)
    assert plan.lists.proved == set()


def test_a_launch_that_the_driver_refuses_ends_the_process(rig: RestoredRig) -> None:
    rig.device.fails[4] = NativeError(700, "illegal address")
    rig.begin(before=all_loaded(rig))
    with pytest.raises(RestoreFailed, match="refuses a launch list: illegal address"):
        rig.supply(4)
    del rig.device.fails[4]


def test_an_address_of_nothing_is_refused_before_anything_is_launched(rig: RestoredRig) -> None:
    rig.device.nowhere[4] = "at 5"
    plan = rig.begin(before=all_loaded(rig))
    assert rig.supply(4) is None
    assert rig.capture.asked == [Kind(WHOLE, 4)]
    assert (rig.device.listed, plan.news.refused) == ([], "addresses")


def test_all_graphs_are_proved_and_not_their_lists(rig: RestoredRig) -> None:
    plan = rig.begin(before=all_loaded(rig))
    rig.device.go()

    def through(rows: int) -> torch.Tensor:
        assert rig.supply(rows) is not None
        return rig.steps.output(rows)

    rig.steps.through = through
    plan.prove()
    assert (plan.news.proved, rig.device.listed) == (3, [])


def test_others_do_not_wait_for_what_ran_from_its_list() -> None:
    """No step of it may come again that proves its graph."""
    rig = RestoredRig((1, 2), prompts=(16, 64), rest_s=DEADLINE_S, launch_lists=True)
    loaded = all_loaded(rig)

    def before() -> None:
        plan_of(rig).expect(40)
        loaded()

    plan = rig.begin(before=before)
    for step in (rig.supply(64, prompt=True), rig.supply(1)):
        assert step is not None
        assert step.once
    rig.device.go()
    settled(rig)
    assert rig.device.built == [prompt_size(64), 1, 2, prompt_size(16)]
    assert (plan.news.ready, plan.news.proved) == (4, 0)
    rig.end()


def test_a_list_is_asked_for_anew_by_every_step() -> None:
    """A set of graphs keeps what it is given, but not that."""
    asked: list[bool] = []
    ran: list[str] = []

    class Supplier:
        def supply(self, kind: Kind, step: object, output: object) -> GraphStep:
            asked.append(True)
            once = len(asked) < 3
            return GraphStep(Ran("list" if once else "graph"), torch.zeros(1), once=once)

    class Ran:
        def __init__(self, name: str) -> None:
            self.name = name

        def replay(self) -> None:
            ran.append(self.name)

        def reset(self) -> None: ...

    graphs = GraphSet(torch.device("cpu"), cast("Any", None), cast("Any", Supplier()))
    for _ in range(4):
        graphs.run(Kind(WHOLE, 2), lambda: torch.zeros(1), lambda: torch.zeros(1))
    assert (len(asked), ran) == (3, ["list", "list", "graph", "graph"])
    assert list(graphs.graphs) == [Kind(WHOLE, 2)]
