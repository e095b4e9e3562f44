"""What a child obeys, in which order, and what it says of requests."""

import socket
import threading
from typing import Any

import msgspec
import pytest
from scripted_engine import INSTANCE, ScriptedEngine, run

from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.envelope import Timed
from pilotlight.common.errors import error_of
from pilotlight.common.messages.engine import (
    Abort,
    LeaveRoom,
    Produced,
    RoomLeft,
    Shutdown,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.engine.errors import EngineError, EngineFailed
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import FinishReason
from pilotlight.worker.engine_child.pins import Pins


def test_a_request_that_waits_for_parts_is_looked_at_when_its_time_is_over(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    scripted.early = True
    parent = start_child()
    parent.send(pool.load(), pool.places()[0], run())
    parent.until(StepDone)
    scripted.due_s = scripted.clock.monotonic_s() + 0.05
    parent.send(Abort(request_id=RequestId("req-other"), attempt=1))  # it reads when that is
    step = parent.until(StepDone, lambda step: any(one.code for one in step.produced))
    assert [(one.request_id, one.code) for one in step.produced] == [("req-1", "deadline_exceeded")]


def test_it_hears_the_parent_while_the_engine_has_nothing_to_do_for_its_device(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    parent = start_child()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    scripted.rest_s = 60.0
    scripted.may_step.clear()  # A step would not come back.
    parent.send(run("req-1"), UnloadStage(instance_id=InstanceId("nothing")))
    parent.until(StageUnloaded)
    scripted.rest_s = 0.0
    scripted.may_step.set()
    parent.send(Abort(request_id=RequestId("req-other"), attempt=1))
    assert parent.until(StepDone).produced


def test_a_request_that_is_refused_ends_with_an_error_and_the_others_go_on(
    start_child: Any, pool: Any
) -> None:
    parent = start_child()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run("req-1"))
    parent.until(StepDone)
    parent.send(run("req-2", "inst-unknown", earlier=3))
    step = parent.until(StepDone, lambda step: any(one.finish for one in step.produced))
    (ended,) = [one for one in step.produced if one.finish]
    assert (ended.request_id, ended.position, ended.code) == ("req-2", 3, "not_loaded")
    assert parent.until(StepDone).produced[0].request_id == "req-1"


def test_what_a_step_says_of_a_request_has_a_code_of_the_taxonomy(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    """A grammar that cannot be used shows in a step, long after its request was taken in."""
    parent = start_child()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    wrong = {
        "finish": FinishReason.ERROR,
        "code": "invalid_request",
        "message": "the grammar is too large",
    }
    scripted.ended.append(Produced(request_id=RequestId("req-2"), attempt=1, position=0, **wrong))
    parent.send(run())
    step = parent.until(StepDone, lambda step: any(one.finish for one in step.produced))
    (ended,) = [one for one in step.produced if one.finish]
    assert (ended.code, ended.message) == ("invalid_request", "the grammar is too large")


def test_every_error_of_the_engine_has_its_code_in_the_taxonomy() -> None:
    kinds, codes = [EngineError], set()
    while kinds:
        kind = kinds.pop()
        codes.add(kind.code)
        kinds += kind.__subclasses__()
    assert len(codes) >= 10
    assert {error_of(code, "as told").code for code in codes} == codes


def test_a_deadline_counts_from_when_the_request_was_sent(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    parent = start_child()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    now = moment_of(SystemClock())
    sent = Moment(at_s=now.at_s - 2.0, wall_offset_s=now.wall_offset_s)
    late = msgspec.structs.replace(run("req-late"), deadline_in_s=3.0)
    parent.send(
        run(), Timed(msgspec.structs.replace(late, request_id=RequestId("req-2")), sent), late
    )
    parent.until(StepDone, lambda step: len(scripted.deadlines) == 3)
    assert scripted.deadlines["req-1"] is None
    assert scripted.deadlines["req-2"] == pytest.approx(sent.at_s + 3.0, abs=1e-6)
    assert now.at_s + 3.0 <= scripted.deadlines["req-late"] <= SystemClock().monotonic_s() + 3.0, (
        "no moment: now"
    )


def test_an_abort_is_obeyed_within_one_step_even_behind_a_load(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    parent = start_child()
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run("req-1"))
    parent.until(StepDone, lambda step: step.running == 1)
    scripted.may_step.clear()
    parent.send(
        pool.load("inst-2"), *pool.places("inst-2"), Abort(request_id=RequestId("req-1"), attempt=1)
    )
    # Whatever step is going on ends; the next one must know.
    scripted.may_step.set()
    parent.until(
        StepDone, lambda step: any(one.finish is FinishReason.CANCELLED for one in step.produced)
    )
    assert parent.until(StageLoaded).instance_id == "inst-2"


def test_memory_is_left_to_others_and_what_the_device_refuses_is_told(
    start_child: Any, scripted: ScriptedEngine
) -> None:
    parent = start_child()
    parent.send(LeaveRoom(device_bytes=7))
    assert parent.until(RoomLeft) == RoomLeft(device_bytes=7)
    scripted.arena.error = EngineFailed("it does not come back")
    parent.send(LeaveRoom(device_bytes=8))
    assert parent.until(RoomLeft) == RoomLeft(device_bytes=8, refused="it does not come back")
    assert scripted.arena.left == [7, 8]


def test_shutdown_and_the_parents_death_end_it(start_child: Any) -> None:
    told = start_child()
    told.send(Shutdown())
    told.thread.join(5)
    assert not told.thread.is_alive()
    left = start_child()
    left.ours.shutdown(socket.SHUT_RDWR)
    left.thread.join(5)
    assert not left.thread.is_alive()


def test_a_step_that_raises_ends_the_process(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    parent = start_child()
    scripted.step_error = RuntimeError("boom")
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run())
    parent.thread.join(5)
    assert isinstance(parent.failure, RuntimeError)


class Slabs:
    """Slabs of the pool that were pinned, one of them at a time when it is let."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.pinning = threading.Event()

    def pin_next(self, wanted: Any = ()) -> bool:
        self.pinned += wanted
        self.pinning.set()
        return True

    def close(self) -> None:
        self.pinned.clear()


def test_what_was_loaded_from_is_pinned_when_nothing_is_to_be_done(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    slabs = Slabs()
    parent = start_child(pins=Pins(lambda view, slab_bytes: slabs, slab_bytes=4096))
    parent.send(pool.load(), *pool.places()[:-1])
    parent.send(UnloadStage(instance_id=InstanceId("nothing")))
    parent.until(StageUnloaded)
    assert slabs.pinned == [], "while anything loads the bus is its"
    parent.send(pool.places()[-1])
    parent.until(StageLoaded)
    last = pool.places()[-1].tensors[-1]
    assert slabs.pinning.wait(5)
    parent.send(UnloadStage(instance_id=INSTANCE))
    parent.until(StageUnloaded)
    assert slabs.pinned[0] <= last.offset + last.size_bytes
    assert slabs.pinned[0] >= last.offset - 2 * 4096, "what was wanted last goes first"


def test_nothing_is_pinned_before_the_first_token_of_a_request_that_has_come(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    came_first: list[bool] = []

    class Noting(Slabs):
        def pin_next(self, wanted: Any = ()) -> bool:
            came_first.append(scripted.prefilled)
            return super().pin_next(wanted)

    slabs = Noting()
    scripted.early = True
    parent = start_child(pins=Pins(lambda view, slab_bytes: slabs, slab_bytes=4096))
    parent.send(pool.load(), *pool.places(), run())
    while not scripted.prefilled:
        parent.until(StepDone)
    parent.send(Abort(request_id=RequestId("req-1"), attempt=1))
    assert slabs.pinning.wait(5)
    assert all(came_first)


@pytest.mark.parametrize("moment", ["begin", "place", "step"])
def test_a_lost_context_ends_the_loop_whatever_it_was_doing(
    start_child: Any, scripted: ScriptedEngine, pool: Any, moment: str
) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    parent = start_child()
    if moment != "begin":
        parent.send(pool.load())
        parent.until(StageOpened)
    setattr(scripted, f"{moment}_error", error)
    if moment == "step":
        for place in pool.places():
            parent.send(place)
        parent.send(run())
    else:
        parent.send(pool.load() if moment == "begin" else pool.places()[0])
    parent.thread.join(5)
    assert parent.failure is error
