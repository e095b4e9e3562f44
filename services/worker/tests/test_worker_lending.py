"""KV beyond grants: it grows into what is lent, makes way for newcomers, and loses no request."""

import asyncio

import pytest

from pilotlight.common.errors import EngineFailed
from pilotlight.common.messages.engine import ResizeStage, StageResized
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.request import FinishReason
from pilotlight.worker import lending
from pilotlight.worker.testing import ROOM, SLOW_S, MakeRig, Rig

pytestmark = pytest.mark.anyio

LOAN = ROOM // 2
CONTEXT = 128
"""Of the tiny model, in tokens."""


def token_bytes(rig: Rig) -> int:
    spec = rig.model.spec
    return spec.kv_bytes_per_token(spec.whole, rig.model.dtype)


def small(rig: Rig, tokens: int) -> int:
    """Bytes that are granted to a stage with KV for so many tokens."""
    return rig.model.device_bytes(rig.model.spec.whole) + tokens * token_bytes(rig)


async def lent_all(rig: Rig, tokens: int) -> None:
    """A stage with a small grant that has grown into all the rest of the device."""
    size = small(rig, tokens)
    await rig.command(rig.a_hold(size=size))
    await rig.state(HeldState.READY)
    await rig.lend(inst_1=ROOM - size)
    await rig.loan(lambda one: one.loan.lent_bytes == ROOM - size)


async def test_an_idle_stage_grows_into_its_loan_and_gives_it_back(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    before = rig.held()
    assert before is not None
    assert before.loan.most_bytes > 0
    await rig.lend(inst_1=LOAN)
    grown = await rig.loan(lambda one: one.loan.lent_bytes == LOAN)
    assert grown.device_bytes == before.device_bytes, "a loan is no grant"
    more = LOAN // token_bytes(rig)
    assert grown.kv_capacity_tokens == before.kv_capacity_tokens + more
    await rig.lend()
    given_back = await rig.loan(lambda one: one.loan.lent_bytes == 0)
    assert given_back.kv_capacity_tokens == before.kv_capacity_tokens


async def test_what_it_may_have_is_known_before_it_has_it(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways and the scheduler see the real room while a stage still loads or grows."""
    monkeypatch.setattr(lending.Lending, "_is_settled", lambda *_: False)
    rig = await make_rig()
    await rig.ready()
    await rig.lend(inst_1=LOAN)
    told = await rig.loan(lambda one: one.loan.offered_bytes == LOAN)
    assert told.loan.lent_bytes == 0
    assert told.kv_reach_tokens == told.kv_capacity_tokens + LOAN // token_bytes(rig)
    assert not told.kv_grows, "nothing waits for it"
    assert rig.facts is not None
    assert rig.facts.kv_free_tokens == told.kv_reach_tokens
    assert rig.facts.free_bytes == ROOM - told.device_bytes, "lent memory is free for placing"


async def test_a_newcomer_has_its_room_at_once(make_rig: MakeRig) -> None:
    """Before any word of the cache, and while requests run; those go on with the same tokens."""
    rig = await make_rig(step_s=SLOW_S)
    await lent_all(rig, tokens=CONTEXT)
    await rig.submit(max_tokens=60)
    await rig.until(lambda: rig.of())
    newcomer = small(rig, CONTEXT)
    await rig.command(rig.a_hold(size=small(rig, CONTEXT)), rig.a_hold("inst-2", size=newcomer))
    await rig.state(HeldState.READY, "inst-2")
    shrunk = rig.held()
    assert shrunk is not None
    assert shrunk.loan.lent_bytes <= ROOM - small(rig, CONTEXT) - newcomer
    last = await rig.finish_of()
    assert last.finish is FinishReason.LENGTH
    assert [token for entry in rig.of() for token in entry.token_ids] == rig.expected(0, 60)


async def test_requests_that_wait_make_kv_grow(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending.Lending, "_is_settled", lambda *_: False)
    rig = await make_rig(step_s=SLOW_S)
    await rig.command(rig.a_hold(size=small(rig, 16)))
    await rig.state(HeldState.READY)
    await rig.lend(inst_1=LOAN)
    await rig.loan(lambda one: one.loan.offered_bytes == LOAN)
    for number in range(4):
        await rig.submit(f"req-{number}", max_tokens=8)
    grown = await rig.loan(lambda one: one.loan.lent_bytes > 0)
    assert grown.loan.wanted_bytes > 0
    assert grown.kv_capacity_tokens > 16
    for number in range(4):
        last = await rig.finish_of(f"req-{number}")
        assert last.finish is FinishReason.LENGTH


async def test_a_request_that_is_larger_than_the_grant_is_taken_on_loan(make_rig: MakeRig) -> None:
    """It ends there when the loan is called in, to go on elsewhere, and is no error of its own."""
    rig = await make_rig(step_s=SLOW_S)
    await rig.command(rig.a_hold(size=small(rig, 16)))
    await rig.state(HeldState.READY)
    assert (await rig.submit("req-0", prompt_ids=[1] * 40)).code == "no_room"
    await rig.lend(inst_1=LOAN)
    await rig.loan(lambda one: one.loan.offered_bytes == LOAN)
    assert (await rig.submit(prompt_ids=[1] * 40, max_tokens=80)).accepted
    await rig.until(lambda: rig.of())
    await rig.lend()
    last = await rig.finish_of()
    assert (last.finish, last.code) == (FinishReason.ERROR, "not_loaded")
    again = await rig.submit(prompt_ids=[1] * 40, attempt=2)
    assert again.code == "not_loaded", "there is room again when others have left"


async def test_a_submit_that_is_repeated_while_it_waits_for_room_is_taken_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway asks again when no answer comes, and may not know that the first one arrived."""
    monkeypatch.setattr(lending.Lending, "_is_settled", lambda *_: False)
    monkeypatch.setattr(lending, "REACH_DEADLINE_S", 10.0)
    rig = await make_rig(step_s=SLOW_S)
    await rig.command(rig.a_hold(size=small(rig, 16)))
    await rig.state(HeldState.READY)
    await rig.lend(inst_1=LOAN)
    await rig.loan(lambda one: one.loan.offered_bytes == LOAN)
    answers = await asyncio.gather(*(rig.submit(max_tokens=60) for _ in range(3)))
    assert [one.message for one in answers if not one.accepted] == []
    last = await rig.finish_of()
    assert last.finish is FinishReason.LENGTH
    assert [token for entry in rig.of() for token in entry.token_ids] == rig.expected(0, 60)
    assert rig.worker.core.table.in_flight(InstanceId("inst-1")) == 0


async def test_an_engine_that_refuses_leaves_stages_as_they_are(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make_rig()
    await rig.ready()

    async def refuse(command: ResizeStage) -> None:
        raise EngineFailed(f"no resize of {command.instance_id}")

    monkeypatch.setattr(rig.worker.core.engine, "resize_stage", refuse)
    await rig.lend(inst_1=LOAN)
    await rig.loan(lambda one: one.loan.offered_bytes == LOAN)
    refused = rig.worker.core.metrics.lending.refused
    await rig.until(lambda: refused._value.get() > 0)
    assert rig.held().loan.lent_bytes == 0
    assert (await rig.submit()).accepted
    assert (await rig.finish_of()).finish is FinishReason.LENGTH


async def test_what_goes_back_beyond_what_is_asked_for_is_free_and_grows_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that gives whole chunks back, and grows layer after layer."""
    rig = await make_rig()
    await lent_all(rig, tokens=CONTEXT)
    held = rig.worker.stages.held["inst-1"]
    granted, lent = held.hold.device_bytes, held.loan.lent_bytes
    asked: list[ResizeStage] = []
    unready_bytes: list[int] = []

    async def resize(command: ResizeStage) -> None:
        asked.append(command)
        unready_bytes.append(held.loan.unready_bytes)
        whole = command.device_bytes == command.target_bytes
        rig.worker.stages.lending.on_resized(
            StageResized(
                instance_id=command.instance_id,
                kv_capacity_tokens=held.kv_capacity_tokens,
                device_bytes=0 if whole else granted + lent // 4,
            )
        )

    monkeypatch.setattr(rig.worker.core.engine, "resize_stage", resize)
    await rig.lend(inst_1=lent // 2)
    await rig.until(lambda: len(asked) > 1 and asked[-1].device_bytes == asked[-1].target_bytes)
    await rig.loan(lambda one: one.loan.lent_bytes == lent // 2)
    assert asked[0] == ResizeStage(
        instance_id=InstanceId("inst-1"), device_bytes=granted + lent // 2, must=True
    )
    assert not any(command.must for command in asked[1:])
    assert asked[1].device_bytes > granted + lent // 4
    assert unready_bytes[:2] == [0, 0]
    # All that came since then waits for the other layers.
    waits = [command.device_bytes - granted - lent // 4 for command in asked[1:-1]]
    assert unready_bytes[2:] == waits
    assert held.loan.unready_bytes == 0


async def test_a_newcomer_is_refused_while_a_loan_does_not_come_back(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the engine hangs: nothing is loaded over what is lent, and the scheduler hears it."""
    monkeypatch.setattr(lending, "ROOM_DEADLINE_S", 0.05)
    rig = await make_rig()
    size = small(rig, CONTEXT)
    await lent_all(rig, CONTEXT)

    async def hang(_: ResizeStage) -> None:
        return None

    monkeypatch.setattr(rig.worker.core.engine, "resize_stage", hang)
    await rig.command(rig.a_hold(size=size), rig.a_hold("inst-2", size=ROOM - size))
    failed = await rig.state(HeldState.FAILED, "inst-2")
    assert failed is not None
    assert failed.reason.startswith("no_room")
    assert rig.held().state is HeldState.READY


async def test_an_engine_that_dies_owes_nothing(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await lent_all(rig, CONTEXT)
    await rig.worker.core.engine.kill("it is ended by a test")
    await rig.state(HeldState.FAILED)
    await rig.command(rig.a_hold("inst-2", size=ROOM))
    await rig.state(HeldState.READY, "inst-2")


async def test_kv_of_the_native_engine_grows_and_shrinks_under_load(make_rig: MakeRig) -> None:
    """Real tensors: requests that are preempted by a shrink give the same tokens."""
    rig = await make_rig(process=True, step_s=SLOW_S)
    size = small(rig, CONTEXT)
    await rig.command(rig.a_hold(size=size))
    await rig.state(HeldState.READY)
    prompts = {f"req-{number}": [1 + number] * 40 for number in range(6)}

    async def run(suffix: str) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            await rig.submit(name + suffix, max_tokens=60, prompt_ids=prompt)
        for name in prompts:
            await rig.finish_of(name + suffix)
            tokens[name] = [token for entry in rig.of(name + suffix) for token in entry.token_ids]
            await rig.ack(60, done=True, request_id=name + suffix)
        return tokens

    queued = await run("-a")
    assert rig.held().loan.lent_bytes == 0
    await rig.lend(inst_1=LOAN)
    await rig.loan(lambda one: one.loan.offered_bytes == LOAN)
    assert rig.held().loan.lent_bytes == 0, "cores take what requests want"
    side_by_side = asyncio.create_task(run("-b"))
    await rig.loan(lambda one: one.loan.lent_bytes > 0)
    await rig.until(lambda: all(rig.of(name + "-b") for name in prompts))
    await rig.lend()
    await rig.loan(lambda one: one.loan.lent_bytes == 0)
    assert not side_by_side.done(), "it shrank while requests ran"
    assert await side_by_side == queued
