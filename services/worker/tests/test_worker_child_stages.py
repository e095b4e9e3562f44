"""What a child does with the parts of a stage, and which phase it counts that to."""

import itertools
import threading
from typing import Any

import pytest
from scripted_engine import INSTANCE, ScriptedEngine, run

from pilotlight.common.clock import ManualClock, SystemClock, moment_of
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.engine import (
    Prefilled,
    StageFailed,
    StageLoaded,
    StageOpened,
    StageUnloaded,
    StepDone,
    UnloadStage,
)
from pilotlight.engine.errors import NoRoom
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.phase import Moment, PhaseName


def test_a_load_reads_the_pool_and_reports_active_intervals(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    scripted.convert_s = 1e-5
    parent = start_child()
    before_s = SystemClock().monotonic_s()
    parent.send(pool.load(), *pool.places())
    loaded = parent.until(StageLoaded)
    after_s = SystemClock().monotonic_s()
    image = pool.path.read_bytes()
    expected = [
        (place.name, image[place.offset : place.offset + 8])
        for part in pool.parts.values()
        for place in part
    ]
    assert scripted.seen == expected
    assert scripted.slots == {INSTANCE: pool.model.slot}
    assert loaded.kv_capacity_tokens == 512
    names = {phase.name for phase in loaded.phases}
    assert names == {PhaseName.INIT, PhaseName.LOAD, PhaseName.CONVERT}
    times = [time_s for phase in loaded.phases for time_s in (phase.start_s, phase.end_s)]
    assert times == sorted(times), "leaf intervals do not overlap"
    assert before_s <= times[0] <= times[-1] <= after_s


def before(seconds: float) -> Moment:
    now = moment_of(SystemClock())
    return Moment(at_s=now.at_s - seconds, wall_offset_s=now.wall_offset_s)


def test_phases_begin_with_the_word_that_led_to_them(start_child: Any, pool: Any) -> None:
    parent = start_child()
    asked, ready, early = before(0.3), before(0.2), before(0.25)
    first, *others = pool.places()
    parent.send(Timed(pool.load(), asked))
    # A part that was ready before the stage was set up is loaded from then on; one that came while
    # another was copied, from its end.
    parent.send(Timed(first, early), *(Timed(place, ready) for place in others))
    loaded = parent.until(StageLoaded)
    init, load = loaded.phases
    assert (init.name, init.start_s) == (PhaseName.INIT, asked.at_s)
    assert (load.name, load.start_s) == (PhaseName.LOAD, init.end_s), (
        "one interval: no part was waited for"
    )
    submitted = before(0.1)
    parent.send(Timed(run(), submitted))
    prefill = parent.until(Prefilled).phase
    assert prefill.start_s == submitted.at_s
    parent.until(StepDone)
    assert parent.sent_s == prefill.end_s


def test_a_load_that_waits_for_its_part_is_not_loading(start_child: Any, pool: Any) -> None:
    parent = start_child()
    first, *others = pool.places()
    parent.send(pool.load(), first)
    # A step comes after a part that was there before it.
    parent.send(run("req-1", "inst-unknown"))
    parent.until(StepDone)
    threading.Event().wait(0.02)
    ready = before(0.005)
    parent.send(*(Timed(place, ready) for place in others))
    _, one, rest = parent.until(StageLoaded).phases
    assert (one.name, rest.name, rest.start_s) == (PhaseName.LOAD, PhaseName.LOAD, ready.at_s)
    assert one.end_s <= rest.start_s


@pytest.mark.parametrize("fault", ["", "prefill=0.2", "load=0.2"])
def test_what_runs_between_two_parts_is_prefill_and_no_load(
    fault: str, work_alone: ManualClock, start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    scripted.early, scripted.step_s, scripted.copy_s = True, 0.004, 0.002
    parent = start_child(fault)
    places = pool.places()
    parent.send(pool.load())
    opened = parent.until(StageOpened)
    assert (opened.instance_id, opened.kv_capacity_tokens) == (INSTANCE, 512)
    parent.send(run(), places[0], places[1])
    for _ in range(2):
        parent.until(StepDone)
    work_alone.advance(0.2)  # nothing comes
    parent.send(*places[2:])
    loaded = parent.until(StageLoaded)
    prefilled = parent.until(Prefilled)
    step = parent.until(StepDone)
    assert len(step.produced) == 1
    work = sorted(
        [*loaded.phases, *prefilled.earlier, prefilled.phase],
        key=lambda phase: (phase.start_s, phase.end_s),
    )
    assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(work)), (
        "nothing is counted twice"
    )
    taken_s = {
        name: sum(one.end_s - one.start_s for one in work if one.name is name) for name in PhaseName
    }
    prefill_s, load_s = (len(places) * one_s for one_s in (scripted.step_s, scripted.copy_s))
    assert taken_s[PhaseName.PREFILL] == pytest.approx(prefill_s + 0.2 * ("prefill" in fault))
    assert taken_s[PhaseName.LOAD] == pytest.approx(load_s + 0.2 * ("load" in fault))
    assert parent.sent_s == prefilled.phase.end_s


@pytest.mark.parametrize(
    ("point", "name"), [("load", PhaseName.LOAD), ("prefill", PhaseName.PREFILL)]
)
def test_an_injected_delay_lies_in_its_phase_alone(
    work_alone: ManualClock,
    start_child: Any,
    scripted: ScriptedEngine,
    pool: Any,
    point: str,
    name: PhaseName,
) -> None:
    scripted.step_s = 0.0
    parent = start_child(f"{point}=0.05")
    parent.send(pool.load(), *pool.places())
    loaded = parent.until(StageLoaded)
    parent.send(run())
    phases = [*loaded.phases, parent.until(Prefilled).phase]
    taken_s = {
        phase: sum(one.end_s - one.start_s for one in phases if one.name is phase)
        for phase in PhaseName
    }
    assert taken_s.pop(name) == pytest.approx(0.05)
    assert sum(taken_s.values()) == pytest.approx(0)


def test_a_stage_that_cannot_be_held_fails_alone(
    start_child: Any, scripted: ScriptedEngine, pool: Any
) -> None:
    parent = start_child()
    scripted.begin_error = NoRoom("too small")
    parent.send(pool.load(), *pool.places())
    failed = parent.until(StageFailed)
    assert (failed.code, failed.message) == ("no_room", "too small")
    scripted.begin_error = None
    scripted.place_error = RuntimeError("boom")
    parent.send(pool.load(), *pool.places())
    assert parent.until(StageFailed).code == "engine_failed"
    scripted.place_error = None
    parent.send(pool.load(), *pool.places())
    assert parent.until(StageLoaded)


def test_a_part_outside_the_pool_fails_the_stage(start_child: Any, pool: Any) -> None:
    parent = start_child()
    place = pool.places()[0]
    tensor = place.tensors[0]
    outside = type(tensor)(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        offset=pool.pool_bytes,
        size_bytes=tensor.size_bytes,
    )
    parent.send(pool.load(), type(place)(instance_id=INSTANCE, part=place.part, tensors=(outside,)))
    assert parent.until(StageFailed).code == "bad_checkpoint"


def test_an_unload_is_answered_and_calls_a_load_off(start_child: Any, pool: Any) -> None:
    parent = start_child()
    parent.send(
        pool.load(), *pool.places()[:2], UnloadStage(instance_id=INSTANCE), *pool.places()[2:]
    )
    assert parent.until(StageUnloaded).instance_id == INSTANCE
    parent.send(UnloadStage(instance_id=InstanceId("never-held")))
    assert parent.until(StageUnloaded).instance_id == "never-held"
    assert not [event for event in parent.events if isinstance(event, StageLoaded)]
