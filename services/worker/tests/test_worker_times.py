"""What a worker shows of its steps and of its engine's start."""

from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.engine import EngineUp, Produced, StepDone
from pilotlight.common.messages.hold import Hold
from pilotlight.policy import shown
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Generation, InstanceId, RequestId
from pilotlight.policy.shown import LEAST_STEPS, NO_TIMES, EngineStart
from pilotlight.policy.testing import model
from pilotlight.worker.engines.child_process import with_process
from pilotlight.worker.held_table import HeldTable
from pilotlight.worker.testing import MakeRig

pytestmark = pytest.mark.anyio


def up(start: EngineStart | None) -> EngineUp:
    return EngineUp(pid=1, device_name="d", load_bytes_per_s=1.0, start=start)


def a_table() -> tuple[HeldTable, InstanceId]:
    """One that holds a stage."""
    nothing = SimpleNamespace(begin=lambda *of: None, set=lambda: None, overlap=True)
    core: Any = SimpleNamespace(
        clock=ManualClock(),
        steps=nothing,
        room_changed=nothing,
        table=SimpleNamespace(shares=nothing),
    )
    one, table = model(), HeldTable(core)
    hold = Hold(
        instance_id=InstanceId("i"),
        generation=Generation(1),
        model=one,
        stage=one.spec.whole,
        device_bytes=100,
    )
    table.add(hold)
    return table, hold.instance_id


def test_a_process_took_what_its_engine_did_not() -> None:
    told = with_process(up(EngineStart(context_s=1.0, libraries_s=3.0)), 4.5)
    assert told.start == EngineStart(create_s=0.5, context_s=1.0, libraries_s=3.0)
    assert with_process(up(None), 4.5) == up(None), "of an engine that does not say"
    short = with_process(up(EngineStart(context_s=1.0)), 0.9)
    assert short.start == EngineStart(context_s=1.0), "two clocks may differ: never below zero"


async def test_decode_steps_and_the_engines_start_are_shown(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "FIRST_AFTER_S", 0.0)
    rig = await make_rig(process=True)
    assert rig.facts is not None
    start = rig.facts.engine_start
    assert start is not None
    assert min(start.create_s, start.context_s, start.libraries_s) > 0
    await rig.ready()
    assert rig.held().times == NO_TIMES
    assert (await rig.submit(max_tokens=LEAST_STEPS + 4)).accepted
    await rig.finish_of()
    held = await rig.until(lambda: (one := rig.held()) and one.times.steps and one)
    assert held.state is HeldState.READY
    assert held.times.batch == 1
    assert held.times.step_s > 0
    assert 0 < held.times.context_tokens <= 2 * rig.model.spec.max_context_tokens
    prefill = await rig.until(lambda: rig.phases.get("prefill"))
    assert prefill[-1].tokens > 0, "how long the prompt was"


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        ({}, True),
        ({"batch_tokens": 9}, False),  # With a prompt.
        ({"running": 3}, False),  # One did not run.
        ({"produced": 1}, False),  # One has no token yet.
        ({"turn_of": "other"}, False),
    ],
)
def test_what_a_decode_step_is(step: dict[str, Any], counts: bool) -> None:
    table, instance_id = a_table()
    told = {"batch_tokens": 2, "running": 2, "produced": 2, "turn_of": instance_id, **step}
    produced = tuple(
        Produced(request_id=RequestId(f"{at}"), attempt=1, position=0, token_ids=(1,))
        for at in range(told.pop("produced"))
    )
    table.stepped(
        StepDone(
            **{**told, "turn_of": InstanceId(told["turn_of"])},
            produced=produced,
            waiting=0,
            kv_free_tokens=0,
            step_time_s=0.01,
            kv_used_tokens=100,
        )
    )
    assert table[instance_id].steps.steps == int(counts)
