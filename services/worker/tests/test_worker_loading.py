"""Stages that are being loaded: the requests that they take, and loads that come to no good end."""

from functools import partial
from typing import Any

import msgspec
import pytest

from pilotlight.common.errors import SourceUnavailable
from pilotlight.common.testing import until
from pilotlight.common.waiting import pause
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.model import Stage
from pilotlight.policy.phase import PhaseName
from pilotlight.policy.request import FinishReason
from pilotlight.worker.core import StartSteps
from pilotlight.worker.testing import INSTANCE, ROOM, MakeRig

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("process", [False, True])
async def test_a_stage_takes_requests_while_it_loads(
    make_rig: MakeRig, leases: Any, process: bool
) -> None:
    rig = await make_rig(process=process)
    leases.gate.clear()
    await rig.command(rig.a_hold())
    held = await rig.until(lambda: (held := rig.held()) and held.open and held)
    assert held.state is HeldState.LOADING
    assert held.kv_capacity_tokens > 0
    for name in ("req-1", "req-2", "req-gone"):
        assert (await rig.submit(name)).accepted
    assert (await rig.submit("req-late", deadline_in_s=0.05)).accepted
    assert (await rig.submit(prompt_ids=[1] * 256, attempt=2)).code == "context_length_exceeded"
    await rig.cancel("req-gone")
    assert (await rig.finish_of("req-late")).code == "deadline_exceeded"
    await rig.until(lambda: rig.worker.core.table.running == 2)
    assert {entry.request_id for entry in rig.entries} == {"req-late"}
    assert not rig.worker.stages.held.busy, "nothing is expected of the engine"
    assert await rig.give_up(INSTANCE) == (), "it is wanted"
    leases.gate.set()
    ready = await rig.state(HeldState.READY)
    assert ready is not None
    assert not ready.open
    for name in ("req-1", "req-2"):
        assert (await rig.finish_of(name)).finish is FinishReason.LENGTH
    tokens = [
        [token for entry in rig.of(name) for token in entry.token_ids]
        for name in ("req-1", "req-2")
    ]
    assert len(tokens[0]) == 4
    assert tokens[0] == tokens[1]
    assert rig.of("req-gone") == []
    await rig.until(lambda: {PhaseName.LOAD, PhaseName.PREFILL} <= rig.phases.keys())


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("how", ["no part", "called off", "another pool", "engine"])
async def test_requests_on_a_stage_that_is_not_loaded_in_the_end_can_run_elsewhere(
    make_rig: MakeRig, leases: Any, process: bool, how: str
) -> None:
    rig = await make_rig(process=process)
    leases.gate.clear()
    await rig.command(rig.a_hold())
    await rig.until(lambda: (held := rig.held()) and held.open)
    for name in ("req-1", "req-2"):
        assert (await rig.submit(name)).accepted
    if how == "called off":
        await rig.command()
    elif how == "engine":
        await rig.worker.core.engine.kill("a test")
    else:
        leases.failure = SourceUnavailable("the disk is gone") if how == "no part" else None
        leases.intact = how != "another pool"
        leases.gate.set()
    for name in ("req-1", "req-2"):
        last = await rig.finish_of(name)
        assert (last.finish, last.code) == (
            FinishReason.ERROR,
            "engine_failed" if how == "engine" else "not_loaded",
        )
        assert [token for entry in rig.of(name) for token in entry.token_ids] == [], (
            "also where every part was placed"
        )
    if how == "called off":
        await rig.state(None)
    else:
        failed = await rig.state(HeldState.FAILED)
        assert failed is not None
        assert not failed.open
    # The worker is as good as new.
    leases.failure, leases.intact = None, True
    leases.gate.set()
    await rig.until(lambda: rig.facts and rig.facts.engine_up)
    await rig.command(rig.a_hold(generation=2))
    await rig.state(HeldState.READY)
    assert (await rig.submit(attempt=2)).accepted
    await rig.until(
        lambda: any(
            entry.attempt == 2 and entry.finish is FinishReason.LENGTH for entry in rig.of()
        )
    )


@pytest.mark.parametrize("intact", [True, False])
@pytest.mark.parametrize("process", [False, True])
async def test_no_token_leaves_before_its_parts_were_found_whole(
    make_rig: MakeRig, leases: Any, process: bool, intact: bool
) -> None:
    rig = await make_rig(process=process)
    leases.gate.clear()
    leases.may_end.clear()
    await rig.command(rig.a_hold())
    await rig.until(lambda: (held := rig.held()) and held.open)
    await rig.submit()
    leases.gate.set()
    await until(
        lambda: (
            sum(
                len(produced.token_ids)
                for produced, _ in rig.worker._delivery._kept.get(INSTANCE, [])
            )
            == 4
        )
    )
    leases.intact = intact
    assert rig.entries == []
    assert (await rig.resend(0)).entries == []
    leases.may_end.set()
    last = await rig.finish_of()
    tokens = [token for entry in rig.of() for token in entry.token_ids]
    assert (last.code, len(tokens)) == (("", 4) if intact else ("not_loaded", 0))


async def test_a_stage_of_several_takes_no_requests_while_it_loads(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig()
    leases.gate.clear()
    await rig.command(msgspec.structs.replace(rig.a_hold(), stage=Stage(0, 1)))
    await rig.state(HeldState.LOADING)
    await rig.until(lambda: leases.open == 1)
    assert (await rig.submit()).code == "not_loaded"
    leases.gate.set()
    held = await rig.state(HeldState.READY)
    assert held is not None
    assert not held.open


async def test_a_load_that_is_not_wanted_any_more_is_called_off(
    make_rig: MakeRig, leases: Any
) -> None:
    rig = await make_rig()
    leases.gate.clear()
    await rig.command(rig.a_hold(size=ROOM))
    await rig.state(HeldState.LOADING)
    await rig.until(lambda: leases.open == 1)
    await rig.command(rig.a_hold("inst-2", size=ROOM))
    leases.gate.set()
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held() is None


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("how", ["granted", "refused", "called off", "engine"])
async def test_an_engine_makes_room_while_the_lease_is_asked_for(
    make_rig: MakeRig, leases: Any, process: bool, how: str
) -> None:
    rig = await make_rig(process=process)
    leases.grants.clear()
    await rig.command(rig.a_hold())
    held = await rig.until(lambda: (held := rig.held()) and held.open and held)
    assert held.state is HeldState.LOADING
    assert leases.open == 0
    assert (await rig.submit()).accepted
    if how == "called off":
        await rig.command()
    elif how == "engine":
        await rig.worker.core.engine.kill("a test")
    else:
        leases.refusal = SourceUnavailable("no loader") if how == "refused" else None
        leases.grants.set()
    last = await rig.finish_of()
    if how == "granted":
        assert last.finish is FinishReason.LENGTH
        await rig.state(HeldState.READY)
        await rig.until(lambda: {PhaseName.INIT, PhaseName.LOAD} <= rig.phases.keys())
        leased_s = max(one.end_s for one in rig.phases[PhaseName.INIT] if one.detail == "lease")
        assert leased_s <= min(one.end_s for one in rig.phases[PhaseName.LOAD])
        return
    assert last.code == ("engine_failed" if how == "engine" else "not_loaded")
    await rig.state(None if how == "called off" else HeldState.FAILED)
    assert leases.open == 0
    # The engine has given its memory back: all of it is there for the next one.
    leases.refusal = None
    leases.grants.set()
    await rig.until(lambda: rig.facts and rig.facts.engine_up)
    await rig.command(rig.a_hold("inst-2", size=ROOM))
    await rig.state(HeldState.READY, "inst-2")


async def test_a_lease_that_is_refused_at_once_never_comes_to_the_engine(
    make_rig: MakeRig, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, told = await make_rig(), list[Any]()

    async def load_stage(*command: Any) -> None:
        told.append(command)

    monkeypatch.setattr(rig.worker.core.engine.main, "load_stage", load_stage)
    rig.worker.core.steps = StartSteps(prefetch=False)
    monkeypatch.setattr(rig.worker.stages.lending, "made_room", partial(pause, 0.01))
    leases.refusal = SourceUnavailable("no loader")
    await rig.command(rig.a_hold())
    failed = await rig.state(HeldState.FAILED)
    assert failed is not None
    assert failed.reason == "source_unavailable: no loader"
    assert told == []


async def test_a_part_that_cannot_be_had_fails_the_stage(make_rig: MakeRig, leases: Any) -> None:
    rig = await make_rig()
    leases.failure = SourceUnavailable("the disk is gone")
    await rig.command(rig.a_hold())
    failed = await rig.state(HeldState.FAILED)
    assert failed is not None
    assert failed.reason == "source_unavailable: the disk is gone"
    assert failed.device_bytes == 0
    leases.failure = None
    await rig.command(rig.a_hold(generation=2))
    ready = await rig.state(HeldState.READY)
    assert ready is not None
    assert ready.generation == 2


async def test_a_hold_without_room_fails(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.command(rig.a_hold(size=ROOM + 1))
    failed = await rig.state(HeldState.FAILED)
    assert failed is not None
    assert failed.reason.startswith("no_room:")
