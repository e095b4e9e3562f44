"""Kernels that a process has loaded stand for an archive's images, without a device: the first
layer is run for each size before anything is restored.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from restored_rig import DEADLINE_S, RestoredRig, StandInDevice, StandInSteps

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda import triggering
from pilotlight.engine.cuda.graphs import Kind
from pilotlight.engine.cuda.triggering import FIRST, TriggeredGraphs

SIZES = (1, 2, 4)


class Steps(StandInSteps):
    """Stands for the runner."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[int, object]] = []

    def run(self, batch: Batch, inputs: torch.Tensor, layers: object) -> None:
        assert batch.num_tokens == len(inputs)
        self.ran.append((len(inputs), layers))


class Graph:
    """Stands for torch's, which no CPU has."""

    def raw_cuda_graph(self) -> int:
        return 77


class Stage:
    """A stage whose archive is opened by a stand-in that says which kernels it was offered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, anywhere: bool) -> None:
        self.rig = RestoredRig(SIZES)
        self.steps = Steps()
        self.device = StandInDevice(self.steps, SIZES)
        self.device.go()
        self.offered: list[object] = []
        self.graphs: dict[Kind, object] = {
            Kind(FIRST, 2): Graph(),
            Kind(FIRST, 4): object(),
            self.steps.kind_of(4): object(),
        }
        self.asked: list[list[int]] = []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(triggering, "triggered_kernels", self.triggered)
        monkeypatch.setattr(triggering, "ArchiveOnDevice", self.open)
        monkeypatch.setattr(
            triggering,
            "Anywhere",
            lambda kernels: SimpleNamespace(
                open=lambda memory, archive: self.open(memory, archive, kernels=kernels),
                fit=lambda _: None,
            ),
        )
        monkeypatch.setattr(
            triggering, "CaptureOnSecondUse", lambda *_, keep: self.captures(keep=keep)
        )
        monkeypatch.setattr("pilotlight.engine.cuda.restored.fitted", lambda _: None)
        layout = self.rig.layout
        self.read = 0
        self.plan = TriggeredGraphs(layout, self.reads, anywhere=anywhere, sizes=SIZES)

    def captures(self, *, keep: bool) -> object:
        assert keep, "what is captured is looked at"
        return self.rig.capture

    def reads(self) -> bytes:
        self.read += 1
        return b"archive"

    def triggered(self, handles: Any) -> dict[str, list[int]]:
        self.asked.append(list(handles))
        return {"kernel": [5]}

    def open(self, memory: object, archive: bytes, kernels: Any) -> StandInDevice:
        self.offered.append(kernels())
        return self.device

    def begin(self) -> None:
        memory = SimpleNamespace(
            slot_number=3, arena=SimpleNamespace(device=torch.device("cpu"), pool_bytes=1 << 30)
        )
        scratch = SimpleNamespace(graphs=self.rig.pool)
        self.plan.supplier(cast("Any", memory), cast("Any", scratch))
        self.plan._fit = lambda _: None
        self.plan.begin(
            cast("Any", self.steps), cast("Any", SimpleNamespace(graphs=self.graphs, uses={}))
        )


@pytest.mark.parametrize("anywhere", [False, True])
def test_the_first_layer_runs_before_anything_is_restored(
    monkeypatch: pytest.MonkeyPatch, anywhere: bool
) -> None:
    stage = Stage(monkeypatch, anywhere=anywhere)
    stage.begin()
    assert (stage.read, stage.offered) == (0, [])
    stage.plan.trigger()
    assert stage.steps.ran == [(rows, FIRST) for rows in SIZES for _ in range(2)]
    for rows in SIZES:
        assert stage.device.began[rows].wait(DEADLINE_S)
    assert (stage.read, stage.offered) == (1, [{"kernel": [5]}])
    assert stage.asked == [[77]], "of the first layer's captures alone"
    stage.plan.close()
    assert stage.plan.news.refused == ""


def test_a_stage_that_goes_before_it_was_triggered_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, anywhere=True)
    stage.begin()
    stage.plan.close()
    assert stage.rig.capture.closed


def test_a_first_layer_that_fails_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, anywhere=True)
    stage.begin()

    def fail(*_: object) -> None:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(stage.steps, "run", fail)
    with pytest.raises(RuntimeError, match="no such layer"):
        stage.plan.trigger()
    for rows in SIZES:
        assert stage.device.began[rows].wait(DEADLINE_S)
    stage.plan.close()
