"""What a cold engine's first token need not wait for: a device's context beside the imports, and
warming up when no model comes.
"""

import os
import sys
import threading
from typing import Any

import pytest
from fake_cuda import fake_cuda
from scripted_engine import Parent, ScriptedEngine

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.engine import EngineUp, Shutdown, StageLoaded
from pilotlight.worker.engine_child import ahead
from pilotlight.worker.engine_child.ahead import WARM_UP_AFTER_S, WarmUp, beside, open_context

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


def test_a_module_comes_when_something_of_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ahead._Later("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", later)
    assert not hasattr(later, "__file__"), "who only looks round has it stay away"
    assert later.rgb_to_hls(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
    assert sys.modules["colorsys"] is not later


def test_it_is_due_a_while_after_the_engine_is_up() -> None:
    clock, done = ManualClock(), list[str]()
    warm_up = WarmUp(clock, lambda: done.append("warm"))
    assert warm_up.before(None) is None, "the engine is not up"
    warm_up.wait()
    due_s = clock.monotonic_s() + WARM_UP_AFTER_S
    assert (warm_up.before(None), warm_up.before(due_s + 1.0)) == (due_s, due_s)
    assert warm_up.before(due_s - 0.1) == due_s - 0.1
    assert not warm_up.due(loading=False)
    clock.advance(WARM_UP_AFTER_S)
    assert warm_up.due(loading=False)
    warm_up.run()
    assert done == ["warm"]
    assert not warm_up.due(loading=False)
    assert warm_up.before(None) is None


def test_it_is_never_due_where_it_has_been_done() -> None:
    warm_up = WarmUp(ManualClock())
    warm_up.wait()
    assert warm_up.before(None) is None
    assert not warm_up.due(loading=False)
    warm_up.run()


def test_an_engine_without_a_model_warms_up(scripted: ScriptedEngine) -> None:
    done = threading.Event()
    parent = Parent(scripted, warm_up=WarmUp(scripted.clock, done.set, 0.0))
    parent.until(EngineUp)
    assert done.wait(JOIN_S)
    parent.send(Shutdown())
    parent.thread.join(JOIN_S)
    assert not parent.thread.is_alive()
    assert parent.failure is None


def test_an_engine_whose_model_has_come_does_not(scripted: ScriptedEngine, pool: Any) -> None:
    clock = scripted.clock = ManualClock()
    done = list[str]()
    parent = Parent(scripted, warm_up=WarmUp(clock, lambda: done.append("warm")))
    parent.send(pool.load(), *pool.places())
    parent.until(StageLoaded)
    clock.advance(2 * WARM_UP_AFTER_S)
    parent.send(Shutdown())
    parent.thread.join(JOIN_S)
    assert not done


def test_a_device_on_which_warming_up_fails_ends_the_process(scripted: ScriptedEngine) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    parent = Parent(scripted, warm_up=WarmUp(scripted.clock, fail, 0.0))
    parent.thread.join(JOIN_S)
    assert isinstance(parent.failure, RuntimeError)
