"""Steps of a start that go on beside each other, switched off one by one: what then waits for
what, by the phases that are reported.
"""

from typing import Any

import msgspec
import pytest

from pilotlight.common.errors import EngineFailed
from pilotlight.common.messages.pipelines import ConnectStage
from pilotlight.common.testing import until
from pilotlight.policy.cluster import HeldState, Member
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import Phase, PhaseName
from pilotlight.policy.request import FinishReason
from pilotlight.worker.core import StartSteps
from pilotlight.worker.engines.sim import SIM_PORT
from pilotlight.worker.testing import INSTANCE, WORKER, MakeRig, Rig

pytestmark = pytest.mark.anyio


async def renewing(make_rig: MakeRig, steps: StartSteps) -> Rig:
    """A worker each of whose starts begins with a new process."""
    rig = await make_rig(process=True)
    rig.worker.core.steps = steps
    rig.worker.core.engine._renew = rig.worker.core.engine.main.renew
    return rig


def process_of(rig: Rig) -> Phase:
    """The phase in which the engine's process began."""
    (phase,) = [one for one in rig.phases[PhaseName.INIT] if one.detail == "process"]
    return phase


@pytest.mark.parametrize("prefetch", [True, False])
async def test_parts_come_while_the_process_begins_or_after_it(
    make_rig: MakeRig, leases: Any, monkeypatch: pytest.MonkeyPatch, prefetch: bool
) -> None:
    rig = await renewing(make_rig, StartSteps(prefetch=prefetch))
    lease, asked_s = leases.lease, list[float]()

    async def watched(*asked: Any, **more: Any) -> Any:
        asked_s.append(rig.worker.core.clock.monotonic_s())
        return await lease(*asked, **more)

    monkeypatch.setattr(leases, "lease", watched)
    before = rig.worker.core.engine.main.pid
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    assert (await rig.submit()).accepted
    assert (await rig.finish_of()).finish is FinishReason.LENGTH
    assert rig.worker.core.engine.main.pid != before, "another process is the engine"
    await rig.until(lambda: PhaseName.LOAD in rig.phases)
    process = process_of(rig)
    if prefetch:
        assert asked_s[0] <= process.start_s
    else:
        assert asked_s[0] >= process.end_s
    assert min(one.start_s for one in rig.phases[PhaseName.LOAD]) >= process.end_s


BETWEEN_PROCESSES_S = 0.01
"""A moment passes between processes by the clock of the day: it is not exact."""


@pytest.mark.parametrize("stream", [True, False])
async def test_parts_are_loaded_as_they_come_or_when_all_are_there(
    make_rig: MakeRig, leases: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    rig = await make_rig(process=True)
    rig.worker.core.steps = StartSteps(stream=stream)
    engine, placed = rig.worker.core.engine, list[int]()
    place = engine.place_part

    async def watched(command: Any, ready: Any = None) -> None:
        placed.append(command.part)
        leases.gate.set()
        await place(command, ready)

    monkeypatch.setattr(engine, "place_part", watched)
    leases.before_gate = 1
    leases.gate.clear()
    await rig.command(rig.a_hold())
    if stream:
        # That the first part is placed lets the others come: nothing else does.
        await rig.state(HeldState.READY)
    else:
        await until(lambda: leases.given == [0])
        assert placed == []
        opened_s = rig.worker.core.clock.monotonic_s()
        leases.gate.set()
        await rig.state(HeldState.READY)
        await rig.until(lambda: PhaseName.LOAD in rig.phases)
        began_s = min(one.start_s for one in rig.phases[PhaseName.LOAD])
        assert began_s >= opened_s - BETWEEN_PROCESSES_S
    assert placed == list(leases.pool.parts)


async def test_a_prompt_waits_for_the_last_part_where_it_is_not_to_overlap(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig(process=True)
    rig.worker.core.steps = StartSteps(overlap=False)
    leases.gate.clear()
    await rig.command(rig.a_hold())
    await until(lambda: (held := rig.worker.stages.held.get(INSTANCE)) is not None and held.open)
    assert (await rig.submit()).code == "not_loaded"
    held = await rig.state(HeldState.LOADING)
    assert held is not None
    assert not held.open
    leases.gate.set()
    await rig.state(HeldState.READY)
    assert (await rig.submit()).accepted
    assert (await rig.finish_of()).finish is FinishReason.LENGTH
    await rig.until(lambda: {PhaseName.LOAD, PhaseName.PREFILL} <= rig.phases.keys())
    loaded_s = max(one.end_s for one in rig.phases[PhaseName.LOAD])
    assert min(one.start_s for one in rig.phases[PhaseName.PREFILL]) >= loaded_s


async def test_a_stage_of_a_group_is_joined_when_it_is_loaded_where_it_is_not_to_overlap(
    make_rig: MakeRig, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    rig.worker.core.steps = StartSteps(overlap=False)
    said: list[ConnectStage] = []

    async def connected(command: ConnectStage) -> None:
        said.append(command)

    monkeypatch.setattr(rig.worker.core.engine.main, "connect_stage", connected)
    leases.gate.clear()
    members = tuple(
        Member(worker_id=WorkerId(name), node_id=NodeId(name), stage=stage, host="h", port=SIM_PORT)
        for name, stage in ((WORKER, Stage(0, 1)), ("other", Stage(1, 2)))
    )
    await rig.command(msgspec.structs.replace(rig.a_hold(), stage=Stage(0, 1), members=members))
    await rig.state(HeldState.LOADING)
    await until(lambda: leases.open == 1)
    rig.worker._groups.follow(rig.worker.stages.held)
    assert said == []
    leases.gate.set()
    await rig.state(HeldState.READY)
    await until(lambda: said)
    assert said[0].proven, "all of its parts are in place"


async def test_a_new_process_opens_a_door_of_its_own(make_rig: MakeRig) -> None:
    rig = await renewing(make_rig, StartSteps())
    rig.worker._groups.port = 4711
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    assert rig.worker._groups.port == 0


async def test_a_process_that_others_are_on_is_not_renewed(make_rig: MakeRig) -> None:
    rig = await renewing(make_rig, StartSteps())
    await rig.command(rig.a_hold(size=200_000))
    await rig.state(HeldState.READY)
    first = rig.worker.core.engine.main.pid
    await rig.command(rig.a_hold(size=200_000), rig.a_hold("inst-2", size=200_000))
    await rig.state(HeldState.READY, "inst-2")
    assert rig.worker.core.engine.main.pid == first


async def test_a_process_that_does_not_start_fails_the_load_and_is_started_anew(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await renewing(make_rig, StartSteps())
    engine, failures = rig.worker.core.engine.main, list[str]()
    start = engine.start

    async def failing() -> Any:
        if not failures:
            failures.append("a test")
            raise EngineFailed("a test")
        return await start()

    monkeypatch.setattr(engine, "start", failing)
    await rig.command(rig.a_hold())
    held = await rig.state(HeldState.FAILED)
    assert held is not None
    assert held.reason.startswith("engine_failed")
    await until(lambda: engine.alive)
    rig.worker.core.engine._renew = None
    await rig.command(rig.a_hold(generation=2))
    await rig.state(HeldState.READY)
