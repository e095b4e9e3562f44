"""What is captured while a stage has nothing to do, without a device."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from pilotlight.engine.cuda.graphs import SIZES, GraphSet, Kind, StageSteps
from pilotlight.engine.cuda.idle import LEAST_SPARE_BYTES, CaptureAhead, KernelsAhead
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.policy.graphs.restoring import PROMPTS
from pilotlight.policy.model import Stage

WHOLE = Stage(0, 4)
ALL = len(SIZES) + len(LENGTHS)


class Steps:
    """Of a stage whose graphs are captured when a kind comes again."""

    def __init__(self) -> None:
        self.has_trials = True
        self.ran: list[Kind] = []
        self.captured: dict[Kind, object] = {}
        self.spare_bytes = LEAST_SPARE_BYTES
        self.fails: Callable[[int], Exception | None] = lambda trials: None

    def kind_of(self, size: int) -> Kind:
        return Kind(WHOLE, size - PROMPTS if size > PROMPTS else size, size > PROMPTS)

    def trial(self, size: int) -> None:
        kind = self.kind_of(size)
        if kind in self.ran:
            self.captured[kind] = object()
        self.ran.append(kind)
        if error := self.fails(len(self.ran)):
            raise error


def ahead_of(steps: Steps) -> CaptureAhead:
    graphs = cast("Any", SimpleNamespace(graphs=steps.captured))
    return CaptureAhead(
        cast("StageSteps", steps), cast("GraphSet", graphs), lambda: steps.spare_bytes
    )


def finish(ahead: CaptureAhead) -> int:
    """How often it had something to do."""
    count = 0
    while not ahead.is_over:
        ahead.one()
        count += 1
    return count


def test_each_kind_runs_twice_the_least_first() -> None:
    steps = Steps()
    assert finish(ahead_of(steps)) == 2 * ALL
    assert len(steps.captured) == ALL
    assert [kind.rows for kind in steps.ran[::2]] == [*SIZES, *LENGTHS]
    assert [kind.prompt for kind in steps.ran[::2]] == [False] * len(SIZES) + [True] * len(LENGTHS)


def test_what_has_a_graph_is_left_alone() -> None:
    steps = Steps()
    there = Kind(WHOLE, SIZES[3])
    steps.captured[there] = object()
    finish(ahead_of(steps))
    assert there not in steps.ran
    assert len(steps.ran) == 2 * (ALL - 1)


def test_what_runs_once_meanwhile_is_captured_by_the_next_trial() -> None:
    steps = Steps()
    ahead = ahead_of(steps)
    ahead.one()
    steps.trial(SIZES[0])  # as a request does
    ahead.one()
    assert [kind.rows for kind in steps.ran] == [SIZES[0], SIZES[0], SIZES[1]]


def test_nothing_more_is_captured_where_there_is_no_memory() -> None:
    steps = Steps()
    steps.fails = lambda trials: (
        torch.OutOfMemoryError("CUDA out of memory.") if trials == 5 else None
    )
    ahead = ahead_of(steps)
    with capture_logs() as logs:
        finish(ahead)
    assert len(steps.ran) == 5
    assert [line["action"] for line in logs] == ["not_captured"]


def test_what_steps_may_need_is_not_taken_and_more_is_captured_when_there_is_some() -> None:
    steps = Steps()
    ahead = ahead_of(steps)
    ahead.one()
    steps.spare_bytes -= 1
    assert ahead.is_over
    steps.spare_bytes += 1
    finish(ahead)
    assert len(steps.captured) == ALL


def test_any_other_error_is_told() -> None:
    steps = Steps()
    steps.fails = lambda trials: RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        ahead_of(steps).one()


def test_a_stage_without_trials_has_nothing_to_do() -> None:
    steps = Steps()
    steps.has_trials = False
    assert ahead_of(steps).is_over


def test_each_kernel_is_launched_once() -> None:
    launched: list[int] = []
    ahead = KernelsAhead(launched.append, (1, 16))
    while not ahead.is_over:
        ahead.one()
    ahead.one()
    assert launched == [1, 16]


def test_a_kernel_without_memory_is_left_to_its_first_use_and_other_errors_are_told() -> None:
    def launch(kind: int) -> None:
        raise (
            torch.OutOfMemoryError("CUDA out of memory.")
            if kind == 1
            else RuntimeError("CUDA error: an illegal memory access")
        )

    ahead = KernelsAhead(launch, (1, 16))
    with capture_logs() as logs:
        ahead.one()
    assert [line["action"] for line in logs] == ["not_rehearsed"]
    with pytest.raises(RuntimeError, match="illegal"):
        ahead.one()
