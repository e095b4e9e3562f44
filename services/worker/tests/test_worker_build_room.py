"""Room of a build: loans make way for it, it makes way for everything else, and it is given back
once.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from pilotlight.common.errors import EngineFailed, NoRoom
from pilotlight.common.messages.engine import LeaveRoom, RoomLeft
from pilotlight.common.testing import until
from pilotlight.policy.cluster import BuildLoan, HeldState
from pilotlight.policy.request import FinishReason
from pilotlight.worker import build_room
from pilotlight.worker.build_room import BuildRoom
from pilotlight.worker.testing import ROOM, SLOW_S, MakeRig, Rig

pytestmark = pytest.mark.anyio

CONTEXT = 128
"""Of the tiny model, in tokens."""
NONE = BuildLoan()


def granted(rig: Rig, tokens: int = CONTEXT) -> int:
    """Bytes of a stage with KV for so many tokens."""
    spec = rig.model.spec
    token_bytes = spec.kv_bytes_per_token(spec.whole, rig.model.dtype)
    return rig.model.device_bytes(spec.whole) + tokens * token_bytes


async def lent_all(make_rig: MakeRig, *, step_s: float = SLOW_S) -> tuple[Rig, BuildRoom]:
    """A stage that has lent itself all that its grant leaves of the device."""
    rig = await make_rig(step_s=step_s)
    size = granted(rig)
    await rig.command(rig.a_hold(size=size))
    await rig.state(HeldState.READY)
    await rig.lend(inst_1=ROOM - size)
    await rig.loan(lambda one: one.loan.lent_bytes == ROOM - size)
    room = rig.worker.stages.lending.build
    rig.worker.core.make_way = room.make_way
    return rig, room


async def told(rig: Rig, holds: Callable[[BuildLoan], bool]) -> None:
    """Wait until a build's room is reported so."""
    await rig.until(lambda: rig.facts is not None and holds(rig.facts.build))


async def test_a_loan_makes_way_for_a_build_and_comes_back_after_it(make_rig: MakeRig) -> None:
    rig, room = await lent_all(make_rig)
    loan = ROOM - granted(rig)
    wanted = loan // 2
    await rig.lend_builds(inst_1=loan)
    room.beside_bytes = 7
    assert rig.worker.stages.lending.buildable_bytes == loan - 7
    await room.lease(wanted)
    await told(rig, lambda build: build.taken_bytes == wanted + 7)
    during = await rig.loan(lambda one: one.loan.lent_bytes <= loan - wanted - 7)
    assert during.loan.offered_bytes == loan, "the loan stays offered"
    assert during.kv_reach_tokens > during.kv_capacity_tokens, "and requests may come for it"
    assert rig.facts is not None
    assert rig.facts.free_bytes == loan, "for placing it is free"
    room.give_back()
    room.give_back()
    await told(rig, lambda build: build == NONE)
    await rig.loan(lambda one: one.loan.lent_bytes == loan)


async def test_a_build_waits_until_the_cache_lends_it_room(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_room, "LEASE_DEADLINE_S", 0.05)
    rig, room = await lent_all(make_rig)
    loan = ROOM - granted(rig)
    with pytest.raises(NoRoom, match="room for a build took longer"):
        await room.lease(loan // 2)
    await told(rig, lambda build: build == NONE)
    held = rig.held()
    assert held is not None
    assert held.loan.lent_bytes == loan, "nobody gave anything back"


async def test_demand_goes_before_a_build_that_waits(make_rig: MakeRig) -> None:
    rig, room = await lent_all(make_rig)
    asking = asyncio.create_task(room.lease(ROOM // 4))
    await told(rig, lambda build: build.wanted_bytes > 0)
    assert (await rig.submit(max_tokens=8)).accepted
    with pytest.raises(NoRoom, match="demand goes first"):
        await asking
    assert room.fact == NONE
    assert (await rig.finish_of()).finish is FinishReason.LENGTH


async def test_what_the_cache_takes_back_makes_way_at_once(make_rig: MakeRig) -> None:
    rig, room = await lent_all(make_rig)
    loan = ROOM - granted(rig)
    ways: list[int] = []

    def make_way() -> None:
        ways.append(room.taken_bytes)
        room.make_way()

    rig.worker.core.make_way = make_way
    await rig.lend_builds(inst_1=loan)
    await room.lease(ROOM // 4)
    await rig.lend(inst_1=loan)
    await until(lambda: ways)
    assert ways[0] == ROOM // 4
    room.give_back()
    await rig.loan(lambda one: one.loan.lent_bytes == loan)


async def test_a_start_has_the_room_when_the_builds_process_has_ended(make_rig: MakeRig) -> None:
    """Beside it requests run with what was there: nobody grows into a process that still ends."""
    rig, room = await lent_all(make_rig)
    size = granted(rig)
    loan = ROOM - size
    await rig.lend_builds(inst_1=loan)
    wanted = ROOM // 4
    await room.lease(wanted)
    newcomer = loan - wanted // 2
    assert (await rig.submit(max_tokens=60)).accepted
    await rig.until(lambda: rig.of())
    await rig.command(rig.a_hold(size=size), rig.a_hold("inst-2", size=newcomer))
    await rig.loan(lambda one: one.state is HeldState.LOADING, "inst-2")
    await rig.loan(lambda one: one.loan.lent_bytes <= wanted // 2)
    held = rig.worker.stages.held
    taken = sum(one.hold.device_bytes + one.loan.lent_bytes for one in held)
    assert taken <= ROOM, "no loan is what is missing"
    assert taken + room.taken_bytes > ROOM
    begun = rig.worker.core.engine.main
    assert not begun._stages.get("inst-2"), "its load waits"
    room.give_back()
    await rig.state(HeldState.READY, "inst-2")
    last = await rig.finish_of()
    assert last.finish is FinishReason.LENGTH
    assert [token for entry in rig.of() for token in entry.token_ids] == rig.expected(0, 60)


async def test_a_request_that_needs_the_loan_calls_a_build_off(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=SLOW_S)
    size = granted(rig, 16)
    loan = ROOM - size
    await rig.command(rig.a_hold(size=size))
    await rig.state(HeldState.READY)
    await rig.lend_builds(inst_1=loan)
    await rig.lend(inst_1=loan)
    await rig.loan(lambda one: one.loan.lent_bytes == loan)
    room = rig.worker.stages.lending.build
    killed: list[int] = []

    def make_way() -> None:
        room.make_way()
        if room.taken_bytes:
            # As when its process ends at once.
            killed.append(room.taken_bytes)
            room.give_back()

    rig.worker.core.make_way = make_way
    await room.lease(loan)
    none = await rig.loan(lambda one: one.loan.lent_bytes == 0)
    assert none.kv_reach_tokens >= CONTEXT
    reply = await rig.submit(prompt_ids=[1] * 40, max_tokens=20)
    assert reply.accepted or reply.code == "not_loaded"
    if not reply.accepted:
        await rig.loan(lambda one: one.kv_capacity_tokens >= 60)
        assert (await rig.submit(prompt_ids=[1] * 40, max_tokens=20, attempt=2)).accepted
    assert killed == [loan]
    assert (await rig.finish_of()).finish is FinishReason.LENGTH


@pytest.mark.parametrize("refused", ["", "the driver says no"])
async def test_a_build_has_no_room_before_the_engine_has_let_go(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    rig, room = await lent_all(make_rig)
    loan = ROOM - granted(rig)
    await rig.lend_builds(inst_1=loan)
    asked: list[int] = []
    engine = rig.worker.core.engine

    async def leave(command: LeaveRoom) -> None:
        asked.append(command.device_bytes)
        if not command.device_bytes:
            return
        assert room.taken_bytes == command.device_bytes
        if not refused:
            raise EngineFailed("it has ended")
        room.on_left(RoomLeft(device_bytes=0))  # late, of what was asked before
        room.on_left(RoomLeft(device_bytes=command.device_bytes, refused=refused))

    monkeypatch.setattr(engine, "leave_room", leave)
    with pytest.raises(NoRoom, match=refused or "it has ended"):
        await room.lease(ROOM // 4)
    assert room.fact == NONE
    await until(lambda: asked == [ROOM // 4, 0])
    await rig.loan(lambda one: one.loan.lent_bytes == loan)


async def test_an_engine_that_dies_ends_what_builds_beside_it(make_rig: MakeRig) -> None:
    rig, room = await lent_all(make_rig)
    await rig.lend_builds(inst_1=ROOM - granted(rig))
    await room.lease(ROOM // 4)
    ways: list[int] = []
    rig.worker.core.make_way = lambda: ways.append(room.taken_bytes)
    with suppress(EngineFailed):
        await rig.worker.core.engine.kill("a test")
    await until(lambda: ways)
    assert ways[0] == ROOM // 4
    room.give_back()
    await told(rig, lambda build: build == NONE)


async def test_whoever_is_cancelled_at_any_instant_leaves_nothing(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine hears at most once that the room is back."""
    rig, room = await lent_all(make_rig)
    loan = ROOM - granted(rig)
    await rig.lend_builds(inst_1=loan)
    engine, leave = rig.worker.core.engine, rig.worker.core.engine.leave_room
    left: list[int] = []

    async def count(command: LeaveRoom) -> None:
        left.append(command.device_bytes)
        await leave(command)

    monkeypatch.setattr(engine, "leave_room", count)
    seen = set[bool]()
    rounds = (*range(12), None)
    for turns in rounds:
        asking = asyncio.create_task(room.lease(ROOM // 4))
        if turns is None:
            await asking
        else:
            await told(rig, lambda build: build.wanted_bytes > 0)
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        had = room.taken_bytes > 0
        seen.add(had)
        room.give_back()
        assert room.fact == NONE
        await told(rig, lambda build: build == NONE)
        await rig.loan(lambda one: one.loan.lent_bytes == loan)
    assert True in seen
    await until(lambda: left[-1] == 0)
    assert left.count(0) <= len(rounds)
