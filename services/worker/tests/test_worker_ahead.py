"""What a cold engine's first token need not wait for: a device's context beside the imports,
warming up when no model comes, copies beside the rest of a stage.
"""

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import fake_cuda
from scripted_engine import Parent, ScriptedEngine, run

from pilotlight.common.clock import ManualClock
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.codec import frame
from pilotlight.common.messages.engine import Abort, EngineUp, Shutdown, StageLoaded
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.worker.engine_child import ahead
from pilotlight.worker.engine_child.ahead import (
    IDLE_S,
    WARM_UP_AFTER_S,
    IdleWork,
    WarmUp,
    beside,
    context_ahead,
    open_context,
)
from pilotlight.worker.engine_child.inbox import EARLY_PARTS, Inbox

JOIN_S = 10.0


def test_a_context_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    fake = fake_cuda()
    before = fake.calls("cuDevicePrimaryCtxRetain")
    thread = beside("context", lambda: open_context(fake.path))
    thread.join(JOIN_S)
    assert fake.calls("cuDevicePrimaryCtxRetain") == before + 1
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY", "as torch would have set it"
    assert thread.daemon, "a driver that does not answer must not keep the process"


def test_a_device_without_a_context_is_told_of_by_who_opens_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    fake = fake_cuda()
    fake.fail("cuDevicePrimaryCtxRetain", 2)
    open_context(fake.path)
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER", "as somebody wanted it"


@pytest.mark.parametrize(
    ("shown", "gpus", "begins"),
    [(None, 1, True), ("1", 2, True), (None, 2, False), ("0,1", 2, False), ("", 1, False)],
)
def test_the_context_of_an_only_gpu_is_made_before_it_is_told_which_one_is_its_own(
    shown: str | None, gpus: int, begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    for index in range(gpus):
        (tmp_path / f"nvidia{index}").touch()
    (tmp_path / "nvidiactl").touch()
    made: list[bool] = []
    thread = context_ahead(lambda: made.append(True), tmp_path)
    if thread is not None:
        thread.join(JOIN_S)
    assert bool(made) is begins


def test_a_module_comes_when_something_of_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ahead._Later("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", later)
    assert not hasattr(later, "__file__"), "who only looks round has it stay away"
    assert later.rgb_to_hls(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
    assert sys.modules["colorsys"] is not later


@pytest.mark.parametrize("collects", [True, False])
def test_imports_leave_the_garbage_collector_as_it_was(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        assert not gc.isenabled()
        raise ImportError("libtorch is broken")

    monkeypatch.setattr(ahead, "import_torch", fail)
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError):
            ahead.import_engine(cuda=False)
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_it_is_due_a_while_after_the_engine_is_up() -> None:
    clock, done = ManualClock(), list[str]()

    def work(interrupted: Callable[[], bool]) -> bool:
        done.append("interrupted" if interrupted() else "warm")
        return not interrupted()

    warm_up = WarmUp(clock, work)
    assert warm_up.before(None) is None, "the engine is not up"
    warm_up.wait()
    due_s = clock.monotonic_s() + WARM_UP_AFTER_S
    assert (warm_up.before(None), warm_up.before(due_s + 1.0)) == (due_s, due_s)
    assert warm_up.before(due_s - 0.1) == due_s - 0.1
    assert not warm_up.due(loading=False)
    clock.advance(WARM_UP_AFTER_S)
    assert warm_up.due(loading=False)
    warm_up.run(lambda: True)
    assert done == ["interrupted"]
    assert not warm_up.due(loading=False)
    clock.advance(WARM_UP_AFTER_S)
    assert warm_up.due(loading=False), "nothing has come for a while"
    warm_up.run(lambda: False)
    assert done == ["interrupted", "warm"]
    assert not warm_up.due(loading=False)
    assert warm_up.before(None) is None


def test_it_is_never_due_where_it_has_been_done() -> None:
    warm_up = WarmUp(ManualClock())
    warm_up.wait()
    assert warm_up.before(None) is None
    assert not warm_up.due(loading=False)
    warm_up.run(lambda: False)


def test_an_engine_without_a_model_warms_up(scripted: ScriptedEngine) -> None:
    done = threading.Event()

    def work(interrupted: Callable[[], bool]) -> bool:
        done.set()
        return not interrupted()

    parent = Parent(scripted, warm_up=WarmUp(scripted.clock, work, 0.0))
    parent.until(EngineUp)
    assert done.wait(JOIN_S)
    parent.send(Shutdown())
    parent.thread.join(JOIN_S)
    assert not parent.thread.is_alive()
    assert parent.failure is None


def test_an_engine_whose_model_has_come_does_not(scripted: ScriptedEngine, pool: Any) -> None:
    clock = scripted.clock = ManualClock()
    done = list[str]()
    parent = Parent(scripted, warm_up=WarmUp(clock, lambda _: done.append("warm") is None))
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    clock.advance(2 * WARM_UP_AFTER_S)
    parent.send(Shutdown())
    parent.thread.join(JOIN_S)
    assert not done


def test_a_command_that_comes_interrupts_it_and_is_obeyed_at_once(
    scripted: ScriptedEngine, pool: Any
) -> None:
    begun, sent, interruptions = threading.Event(), threading.Event(), list[bool]()

    def work(interrupted: Callable[[], bool]) -> bool:
        interruptions.append(interrupted())
        begun.set()
        assert sent.wait(JOIN_S)
        interruptions.append(interrupted())
        return False

    parent = Parent(scripted, warm_up=WarmUp(scripted.clock, work, 0.0))
    parent.until(EngineUp)
    assert begun.wait(JOIN_S)
    parent.send(pool.load(), *pool.places())
    sent.set()
    parent.until(StageLoaded)
    assert interruptions == [False, True], "never again, once a model has come"
    parent.close()


def test_a_device_on_which_warming_up_fails_ends_the_process(scripted: ScriptedEngine) -> None:
    def fail(_: object) -> bool:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    parent = Parent(scripted, warm_up=WarmUp(scripted.clock, fail, 0.0))
    parent.thread.join(JOIN_S)
    assert isinstance(parent.failure, RuntimeError)


def test_work_for_later_is_due_when_there_was_nothing_to_do_for_a_while() -> None:
    clock, left = ManualClock(), ["a piece", "another"]

    def work() -> bool:
        left.pop(0)
        return bool(left)

    later = IdleWork(clock, work)
    assert (later.due, later.before(None)) == (False, None)
    later.look(idle=True)
    due_s = clock.monotonic_s() + IDLE_S
    assert (later.due, later.before(None), later.before(due_s - 0.01)) == (
        False,
        due_s,
        due_s - 0.01,
    )
    later.look(idle=False)
    assert later.before(None) is None, "something came"
    later.look(idle=True)
    clock.advance(IDLE_S)
    later.look(idle=True)
    assert later.due
    later.run()
    assert later.due, "at once, as long as there is more"
    later.run()
    later.look(idle=True)
    assert (later.due, later.before(None), left) == (False, None, [])


def test_there_may_be_more_for_later_when_something_has_run() -> None:
    clock = ManualClock()
    later = IdleWork(clock, lambda: False, 0.0)
    later.look(idle=True)
    later.run()
    assert not later.due
    later.look(idle=False)
    later.look(idle=True)
    assert later.due


def test_an_engine_prepares_while_it_has_nothing_to_do(scripted: ScriptedEngine) -> None:
    scripted.unprepared = ["a piece", "another"]
    parent = Parent(scripted)
    parent.until(EngineUp)
    assert scripted.prepared.wait(JOIN_S)
    parent.close()


def test_an_engine_looks_again_behind_a_batch_that_begins_and_ends_at_once(
    scripted: ScriptedEngine,
) -> None:
    scripted.unprepared = ["a piece"]
    parent = Parent(scripted)
    assert scripted.prepared.wait(JOIN_S)
    scripted.prepared.clear()
    scripted.unprepared = ["another, which is wanted since"]
    parent.send(Abort(request_id=RequestId("r"), attempt=1))
    assert scripted.prepared.wait(JOIN_S)
    parent.close()


def test_an_engine_that_is_asked_for_something_does_that_first(
    scripted: ScriptedEngine, pool: Any
) -> None:
    clock = scripted.clock = ManualClock()
    scripted.unprepared = ["a piece"]
    parent = Parent(scripted)
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    assert scripted.unprepared, "there was something to do"
    tries = iter(range(int(JOIN_S / IDLE_S)))
    while not scripted.prepared.wait(IDLE_S):
        assert next(tries, None) is not None
        clock.advance(IDLE_S)
    parent.close()


def test_copies_of_parts_that_have_come_begin_before_a_stage_is_set_up(
    scripted: ScriptedEngine, pool: Any
) -> None:
    parent = Parent(scripted)
    parts = pool.places()
    parent.send(pool.load(), *parts)
    parent.until(StageLoaded)
    assert scripted.early_parts == [sorted(one.part for one in parts)[:EARLY_PARTS]]
    parent.close()


def test_copies_of_parts_wait_for_their_turn_while_batches_run(
    scripted: ScriptedEngine, pool: Any
) -> None:
    parent = Parent(scripted)
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    parent.send(run(), pool.load("inst-2"), *pool.places("inst-2"))
    assert parent.until(StageLoaded).instance_id == "inst-2"
    assert scripted.early_parts[1] is None
    parent.close()


def test_an_inbox_tells_of_parts_and_keeps_the_order(pool: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox(theirs)
        said = [pool.load(), *pool.places(), *pool.places("inst-2"), Shutdown()]
        ours.sendall(b"".join(frame(Timed(one)) for one in said))
        ours.shutdown(socket.SHUT_WR)
        found = inbox.parts_of(InstanceId("inst-2"))
        assert [one.part for one in found] == [one.part for one in pool.places()][:EARLY_PARTS]
        assert inbox.parts_of(InstanceId("inst-3")) == [], "and the parent's end takes nothing away"
        assert [one.message for one in inbox.commands()] == said
        assert not inbox.read()


def test_work_for_later_is_looked_for_again_where_more_may_come() -> None:
    clock, left = ManualClock(), [True, False, False]
    later = IdleWork(clock, lambda: left.pop(0), again_s=5.0)
    later.look(idle=True)
    assert later.before(None) == clock.monotonic_s() + IDLE_S
    clock.advance(IDLE_S)
    later.run()
    assert later.due, "there is more"
    later.run()
    for _ in range(2):
        later.look(idle=True)
        assert not later.due
        assert later.before(None) == pytest.approx(clock.monotonic_s() + 5.0), (
            "it sleeps until then"
        )
        clock.advance(5.0)
        if left:
            later.run()
    later.look(idle=False)
    assert later.before(None) is None
