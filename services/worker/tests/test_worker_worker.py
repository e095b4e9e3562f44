"""A whole worker on a real NATS server: hold, load, submit, tokens, acknowledgement, and the end of
its engine or of itself.
"""

import asyncio
import os
import signal
from typing import Any

import pytest

from pilotlight.common.buckets import WORKERS
from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.errors import NotFound
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.tokens import SubmitReply
from pilotlight.policy.cluster import DeviceKind, HeldState, WorkerFacts
from pilotlight.policy.phase import Moment, PhaseName
from pilotlight.policy.request import FinishReason, Grammar, GrammarKind
from pilotlight.worker.app import build
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.testing import DEADLINE_S, INSTANCE, ROOM, SLOW_S, WORKER, MakeRig

pytestmark = pytest.mark.anyio


async def test_hold_load_submit_tokens_ack(make_rig: MakeRig, leases: Any) -> None:
    rig = await make_rig()
    assert rig.facts is not None
    assert rig.facts.warm
    await rig.ready()
    assert leases.asked[0][:2] == (INSTANCE, rig.model.spec.parts_of(rig.model.spec.whole))
    reply = await rig.submit(max_tokens=6)
    assert reply == SubmitReply(accepted=True)
    last = await rig.finish_of()
    assert last.finish is FinishReason.LENGTH
    entries = rig.of()
    assert [token for entry in entries for token in entry.token_ids] == rig.expected(0, 6)
    assert [entry.seq for entry in entries] == sorted({entry.seq for entry in entries})
    await rig.ack(6, done=True)
    await rig.until(lambda: len(rig.worker.core.table) == 0)
    with pytest.raises(NotFound):
        await rig.resend(6)
    assert rig.facts.held[0].in_flight == 0
    await rig.until(
        lambda: {PhaseName.INIT, PhaseName.LOAD, PhaseName.PREFILL} <= rig.phases.keys()
    )
    (prefill,) = rig.phases[PhaseName.PREFILL]
    assert all(phase.end_s <= prefill.start_s for phase in rig.phases[PhaseName.LOAD])


@pytest.mark.parametrize("process", [False, True])
async def test_phases_touch_from_the_command_to_the_first_token(
    make_rig: MakeRig, process: bool
) -> None:
    """Whatever the messages between two processes take belongs to the phase that they lead to."""
    rig = await make_rig(process=process)
    now = moment_of(SystemClock())
    sent = Moment(at_s=now.at_s - 0.2, wall_offset_s=now.wall_offset_s)
    await rig.command(rig.a_hold(), sent=sent)
    held = await rig.state(HeldState.READY)
    submitted_s = SystemClock().monotonic_s()
    await rig.submit()
    await rig.finish_of()
    await rig.until(
        lambda: {PhaseName.INIT, PhaseName.LOAD, PhaseName.PREFILL} <= rig.phases.keys()
    )
    inits = rig.phases[PhaseName.INIT]
    assert min(phase.start_s for phase in inits) == sent.at_s
    if process:
        lease, engine = inits if inits[0].detail == "lease" else inits[::-1]
        assert lease.end_s == engine.start_s
    assert held is not None
    assert held.loaded is not None
    assert held.loaded.at_s == max(phase.end_s for phase in rig.phases[PhaseName.LOAD])
    (prefill,) = rig.phases[PhaseName.PREFILL]
    assert submitted_s <= prefill.start_s
    assert rig.first_sampled is not None
    assert 0 <= rig.first_sampled.at_s - prefill.end_s < (1e-9 if process else 1.0)


async def test_a_repeated_submit_runs_once(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    replies = await asyncio.gather(*(rig.submit() for _ in range(5)))
    assert all(reply.accepted for reply in replies)
    await rig.finish_of()
    await rig.submit()
    await rig.ack(4, done=True)
    assert (await rig.submit()).accepted, "also after it was forgotten"
    await rig.submit("req-2")
    await rig.finish_of("req-2")
    assert sum(len(entry.token_ids) for entry in rig.of()) == 4


async def test_resend_gives_what_is_not_acknowledged(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    await rig.submit(output_ids=[9, 9, 9], max_tokens=10)
    await rig.finish_of()
    batch = await rig.resend(3)
    assert batch.worker_id == WORKER
    assert [(entry.seq, entry.token_ids, entry.finish) for entry in batch.entries] == [
        (3, rig.expected(3, 10, (9, 9, 9)), FinishReason.LENGTH)
    ]
    assert (await rig.resend(8)).entries[0].token_ids == rig.expected(8, 10, (9, 9, 9))


async def test_cancel_is_obeyed_and_nothing_more_is_sent(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=SLOW_S)
    await rig.ready()
    await rig.submit(max_tokens=200)
    await rig.until(lambda: rig.of())
    await rig.cancel()
    await rig.until(lambda: rig.worker.core.table.running == 0)
    sent = len(rig.of())
    await rig.submit("req-2")
    await rig.finish_of("req-2")
    assert len(rig.of()) <= sent + 1, "at most the batch that was on its way"
    assert rig.of()[-1].finish is None


@pytest.mark.parametrize("process", [False, True])
async def test_a_deadline_ends_a_request_with_its_error_and_frees_its_room(
    make_rig: MakeRig, process: bool
) -> None:
    rig = await make_rig(process=process)
    await rig.ready()
    await rig.submit("req-other", max_tokens=200)
    await rig.submit("req-none", max_tokens=200, deadline_in_s=0.0)
    await rig.submit("req-late", max_tokens=200, deadline_in_s=0.05)
    await rig.submit("req-in-time", max_tokens=5, deadline_in_s=60.0)
    none, late, other = [
        await rig.finish_of(name) for name in ("req-none", "req-late", "req-other")
    ]
    for entry in (none, late):
        assert (entry.finish, entry.code) == (FinishReason.ERROR, "deadline_exceeded")
    tokens = {
        name: [token for entry in rig.of(name) for token in entry.token_ids]
        for name in ("req-none", "req-late", "req-other")
    }
    assert tokens["req-none"] == []
    assert late.message == f"the deadline passed after {len(tokens['req-late'])} output tokens"
    assert len(tokens["req-late"]) < 200
    assert len(tokens["req-other"]) == 200, "the others have their time"
    assert other.finish is (await rig.finish_of("req-in-time")).finish is FinishReason.LENGTH
    assert tokens["req-other"][: len(tokens["req-late"])] == tokens["req-late"]
    assert rig.worker.core.table.running == 0
    await rig.until(
        lambda: (
            rig.facts and rig.held() and rig.facts.kv_free_tokens == rig.held().kv_capacity_tokens
        )
    )


async def test_a_simulated_worker_refuses_a_grammar_by_name(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    await rig.submit("req-other", max_tokens=20)
    await rig.submit(grammar=Grammar(kind=GrammarKind.REGEX, text="a+"))
    refused = await rig.finish_of()
    assert (refused.finish, refused.code, refused.token_ids) == (
        FinishReason.ERROR,
        "invalid_request",
        [],
    )
    assert "simulated worker" in refused.message
    assert (await rig.finish_of("req-other")).finish is FinishReason.LENGTH
    assert rig.worker.core.table.running == 0


async def test_refusals_say_why_and_when_to_retry(make_rig: MakeRig, leases: Any) -> None:
    rig = await make_rig(max_requests=1, step_s=SLOW_S)
    refused = await rig.submit()
    assert (refused.accepted, refused.code) == (False, "not_loaded")
    assert refused.retry_after_s > 0
    await rig.ready()
    assert (await rig.submit(prompt_ids=[1] * 256)).code == "context_length_exceeded"
    assert (await rig.submit("req-1", max_tokens=200)).accepted
    full = await rig.submit("req-2")
    assert (full.code, full.retry_after_s > 0) == ("queue_full", True)
    await rig.cancel()


async def test_stopping_tells_the_gateways_of_what_runs(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=SLOW_S)
    await rig.ready()
    await rig.submit(max_tokens=200)
    await rig.until(lambda: rig.of())
    await rig.worker.stop()
    last = await rig.finish_of()
    assert (last.finish, last.code) == (FinishReason.ERROR, "worker_lost")


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_the_engines_death_in_mid_stream(make_rig: MakeRig, process: bool) -> None:
    rig = await make_rig(process=process, step_s=SLOW_S)
    await rig.ready()
    await rig.submit(max_tokens=200)
    await rig.until(lambda: rig.of())
    engine = rig.worker.core.engine.main
    if isinstance(engine, ProcessEngine):
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
    else:
        await engine.kill("a test")
    last = await rig.finish_of()
    assert (last.finish, last.code) == (FinishReason.ERROR, "engine_failed")
    failed = await rig.state(HeldState.FAILED)
    assert failed is not None
    assert failed.reason.startswith("engine_failed:")
    received = [token for entry in rig.of() for token in entry.token_ids]
    assert last.seq + len(last.token_ids) == len(received), (
        "no token was skipped or repeated before the end"
    )
    assert (await rig.resend(0)).entries[0].token_ids == received

    await rig.command(rig.a_hold("inst-1", generation=2))
    await rig.until(lambda: rig.facts and rig.facts.engine_up)
    await rig.state(HeldState.READY)
    resumed = await rig.submit(attempt=2, max_tokens=len(received) + 4, output_ids=received)
    assert resumed.accepted
    more = await rig.until(
        lambda: next((entry for entry in rig.of() if entry.attempt == 2 and entry.finish), None)
    )
    assert more.finish is FinishReason.LENGTH


async def test_the_last_value_is_there_for_late_joiners(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    seen = asyncio.Event()

    async def on_change(key: str, facts: WorkerFacts | None) -> None:
        if facts is not None and facts.held and facts.held[0].state is HeldState.READY:
            assert key == WORKER
            seen.set()

    watching = asyncio.create_task((await rig.bus.bucket(WORKERS)).watch(WorkerFacts, on_change))
    async with asyncio.timeout(DEADLINE_S):
        await seen.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.slow
async def test_two_hundred_simulated_workers_in_one_process(
    make_context: Any, connect_bus: Any
) -> None:
    context = make_context("worker", WorkerSettings(node_id="node-sim", device_bytes=ROOM))
    application = await build(context, simulated=200)
    reported: set[str] = set()
    everyone = asyncio.Event()

    async def on_report(report: WorkerReport) -> None:
        assert report.facts.device.kind is DeviceKind.SIM
        reported.add(report.facts.worker_id)
        if len(reported) == 200:
            everyone.set()

    observer = await connect_bus("observer")
    await observer.subscribe(WORKER_REPORTS, WorkerReport, on_report)
    for component in application.components:
        await component.start()
    async with asyncio.timeout(DEADLINE_S):
        await everyone.wait()
    assert application.ready() is None
    for component in application.components:
        await component.stop()
    assert application.ready() is not None
