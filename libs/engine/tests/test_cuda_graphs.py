"""When steps are captured and replayed, without a device: the capture itself is a stand-in."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graphs import GraphSet, GraphStep, Kind
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.policy.model import Stage

ONE, TWO = (Kind(Stage(0, 4), rows) for rows in (1, 2))


class Pool:
    """Of no memory."""

    def __init__(self) -> None:
        self.in_use = False
        self.trimmed = 0
        self.closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self.in_use = True
        try:
            yield
        finally:
            self.in_use = False

    def trim(self) -> None:
        assert not self.in_use
        self.trimmed += 1

    def close(self) -> None:
        self.closed = True


class Graph:
    """Says when it was replayed."""

    def __init__(self) -> None:
        self.replays = 0
        self.is_reset = False

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        self.is_reset = True


class Restored:
    """A supplier that has some graphs before anything runs."""

    def __init__(self, *kinds: Kind) -> None:
        self.there = {
            kind: GraphStep(Graph(), torch.full((1,), float(kind.rows))) for kind in kinds
        }
        self.asked: list[Kind] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def expect(self, tokens: int) -> bool:
        return False

    def extended(self) -> None: ...

    def arriving(self, requests: int) -> None: ...

    def sampled(self) -> None: ...

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        self.asked.append(kind)
        return self.there.get(kind)


def scratch_of(eager: Pool) -> Scratch:
    return cast("Scratch", SimpleNamespace(eager=eager, graphs=Pool()))


@pytest.fixture
def eager() -> Pool:
    return Pool()


@pytest.fixture
def graphs(eager: Pool, monkeypatch: pytest.MonkeyPatch) -> GraphSet:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    device, scratch = torch.device("cuda", 0), scratch_of(eager)
    return GraphSet(device, scratch, CaptureOnSecondUse(device, scratch))


def run(graphs: GraphSet, kind: Kind) -> str:
    """How it ran."""
    said: list[str] = []

    def step() -> Tensor:
        said.append("eager")
        return torch.zeros(1)

    def output() -> Tensor:
        said.append("captured")
        return torch.zeros(1)

    graphs.run(kind, step, output)
    return said[-1] if said else "replayed"


def test_a_kind_is_captured_when_it_comes_again(
    graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(
        CaptureOnSecondUse,
        "_capture",
        lambda self, step, output: GraphStep(cast("Any", graph), output),
    )
    assert [run(graphs, kind) for kind in (ONE, ONE, ONE, TWO)] == [
        "eager",
        "captured",
        "replayed",
        "eager",
    ]


def test_what_there_is_no_memory_to_capture_runs_eagerly_from_then_on(
    graphs: GraphSet, eager: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[None] = []

    def capture(self: CaptureOnSecondUse, step: object, output: Tensor) -> None:
        tried.append(None)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(CaptureOnSecondUse, "_capture", capture)
    assert [run(graphs, ONE) for _ in range(4)] == ["eager"] * 4
    assert (len(tried), eager.trimmed) == (2, 1), "once more, without what eager steps left over"


def test_a_capture_succeeds_in_the_memory_that_eager_steps_left_over(
    graphs: GraphSet, eager: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: CaptureOnSecondUse, step: object, output: Tensor) -> GraphStep:
        if not eager.trimmed:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return GraphStep(cast("Any", SimpleNamespace(replay=lambda: None)), output)

    monkeypatch.setattr(CaptureOnSecondUse, "_capture", capture)
    assert [run(graphs, ONE) for _ in range(3)] == ["eager", "captured", "replayed"]


@pytest.mark.parametrize("refusals", [1, 2])
def test_an_eager_step_without_memory_runs_once_more_after_what_is_left_over_was_given_back(
    graphs: GraphSet, eager: Pool, refusals: int
) -> None:
    """Nothing of the step that failed is held then: its tensors would be in the way."""
    left: list[weakref.ref[Tensor]] = []

    def step() -> Tensor:
        assert eager.in_use
        assert len(left) == eager.trimmed
        assert all(tensor() is None for tensor in left)
        result = torch.zeros(1)
        left.append(weakref.ref(result))
        if len(left) <= refusals:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result

    if refusals == 1:
        assert graphs.run(ONE, step, step).shape == (1,)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            graphs.run(ONE, step, step)
    assert (len(left), eager.trimmed) == (2, 1)


def test_another_error_of_a_step_is_told_at_once(graphs: GraphSet, eager: Pool) -> None:
    def step() -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        graphs.run(ONE, step, step)
    assert not eager.trimmed


def test_a_capture_that_fails_otherwise_is_told(
    graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: CaptureOnSecondUse, step: object, output: Tensor) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(CaptureOnSecondUse, "_capture", capture)
    run(graphs, ONE)
    with pytest.raises(RuntimeError, match="not permitted"):
        run(graphs, ONE)


def test_a_graph_that_another_supplier_has_is_replayed_from_the_first_step_on(eager: Pool) -> None:
    """Nothing but the supplier decides where graphs come from; it is asked once for each that it
    has.
    """
    supplier = Restored(ONE)
    graphs = GraphSet(torch.device("cuda", 0), scratch_of(eager), supplier)
    assert [run(graphs, kind) for kind in (ONE, ONE, TWO, TWO)] == [
        "replayed",
        "replayed",
        "eager",
        "eager",
    ]
    assert supplier.asked == [ONE, TWO, TWO]
    graph = supplier.there[ONE].graph
    assert isinstance(graph, Graph)
    assert (graph.replays, dict(graphs.graphs)) == (2, {ONE: graph})
    assert graphs.run(ONE, lambda: torch.zeros(1), lambda: torch.zeros(1)).item() == 1.0, (
        "the graph's own output"
    )


def test_closing_resets_every_graph_and_closes_their_pool(eager: Pool) -> None:
    supplier, scratch = Restored(ONE, TWO), scratch_of(eager)
    graphs = GraphSet(torch.device("cuda", 0), scratch, supplier)
    assert [run(graphs, kind) for kind in (ONE, TWO)] == ["replayed", "replayed"]
    graphs.close()
    assert [cast("Graph", step.graph).is_reset for step in supplier.there.values()] == [True, True]
    assert supplier.closed, "its memory lies in the pool"
    assert (dict(graphs.graphs), cast("Pool", scratch.graphs).closed) == ({}, True)
