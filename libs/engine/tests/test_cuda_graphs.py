"""When steps are captured, without a device: the capture itself is a stand-in."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pilotlight.engine.cuda.graphs import Graphs, Kind
from pilotlight.policy.types import Stage

ONE, TWO = (Kind(Stage(0, 4), rows) for rows in (1, 2))


class Pool:
    """Of no memory."""

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    return Graphs(torch.device("cuda", 0), SimpleNamespace(eager=Pool(), graphs=Pool()))  # type: ignore[arg-type]


def run(graphs: Graphs, kind: Kind) -> str:
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


def test_a_kind_is_captured_when_it_comes_again(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(Graphs, "_capture", lambda self, step, output: SimpleNamespace(graph=graph, output=output))
    assert [run(graphs, kind) for kind in (ONE, ONE, ONE, TWO)] == ["eager", "captured", "replayed", "eager"]


def test_what_there_is_no_memory_to_capture_runs_eagerly_from_then_on(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[None] = []

    def capture(self: Graphs, step: object, output: Tensor) -> None:
        tried.append(None)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Graphs, "_capture", capture)
    assert [run(graphs, ONE) for _ in range(4)] == ["eager"] * 4
    assert len(tried) == 1


def test_a_capture_that_fails_otherwise_is_told(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Graphs, step: object, output: Tensor) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Graphs, "_capture", capture)
    run(graphs, ONE)
    with pytest.raises(RuntimeError, match="not permitted"):
        run(graphs, ONE)
