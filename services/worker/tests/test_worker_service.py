"""A whole worker on a real NATS server: hold, load, submit, tokens, acknowledgement, and everything that goes wrong."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.common.buckets import WORKERS
from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.errors import NotFound, SourceUnavailable
from pilotlight.common.messages.hold import Hold, WorkerHold, worker_hold_subject
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.room import GivenUp, GiveUp, give_up_subject
from pilotlight.common.messages.tokens import (
    Ack,
    AckEntry,
    Cancel,
    Resend,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    ack_subject,
    cancel_subject,
    resend_subject,
    submit_subject,
    tokens_subject,
)
from pilotlight.common.phases import PhaseReporter
from pilotlight.common.testing import until
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.types import (
    DeviceKind,
    Epoch,
    FinishReason,
    GatewayId,
    Generation,
    Grammar,
    GrammarKind,
    HeldStage,
    HeldState,
    InstanceId,
    ModelName,
    Moment,
    NodeId,
    Phase,
    PhaseName,
    RequestId,
    Sampling,
    Stage,
    WorkerFacts,
    WorkerId,
)
from pilotlight.worker.app import build
from pilotlight.worker.child_process import ChildOptions
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.engine_client import EngineClient
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.metrics import WorkerMetrics
from pilotlight.worker.process_engine import ProcessEngine
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.sim_engine import SimEngine, SimProfile, SimTokens
from pilotlight.worker.vocabularies import Vocabularies
from pilotlight.worker.worker import Worker

pytestmark = pytest.mark.anyio

GATEWAY = GatewayId("gw-1")
WORKER = WorkerId("node-1-w0")
INSTANCE = InstanceId("inst-1")
ROOM = 1 << 20
DEADLINE_S = 10.0


class Rig:
    """One worker, and everyone it talks to."""

    def __init__(self, worker: Worker, bus: Any, model: Any) -> None:
        self.worker = worker
        self.bus = bus
        self.model = model
        self.epoch = 1
        self.facts: WorkerFacts | None = None
        self.epoch_seen = Epoch(0)
        self.phases: dict[PhaseName, list[Phase]] = {}
        self.entries: list[TokenEntry] = []
        self.batches = 0
        self.first_sampled: Moment | None = None
        self._news = asyncio.Event()

    async def listen(self) -> None:
        await self.bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_report)
        await self.bus.subscribe(tokens_subject(GATEWAY), TokenBatch, self._on_tokens, binary=True)
        await self.bus.serve(PHASES_SUBJECT, PhaseReport, self._on_phases)

    async def _on_report(self, report: WorkerReport) -> None:
        self.facts, self.epoch_seen = report.facts, report.epoch_seen
        self._news.set()

    async def _on_tokens(self, batch: TokenBatch) -> None:
        self.first_sampled = batch.sampled if self.batches == 0 else self.first_sampled
        self.batches += 1
        self.entries += batch.entries
        self._news.set()

    async def _on_phases(self, report: PhaseReport) -> PhasesKept:
        for phase in report.phases:
            self.phases.setdefault(phase.name, []).append(phase)
        self._news.set()
        return PhasesKept()

    async def until(self, holds: Callable[[], Any]) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while not (result := holds()):
                await self._news.wait()
                self._news.clear()
        return result

    def held(self, instance_id: str = INSTANCE) -> HeldStage | None:
        return next((one for one in (self.facts.held if self.facts else ()) if one.instance_id == instance_id), None)

    async def state(self, state: HeldState | None, instance_id: str = INSTANCE) -> HeldStage | None:
        """Wait until the stage is reported so; None: not at all."""

        def reached() -> bool:
            held = self.held(instance_id)
            return self.facts is not None and (held.state if held else None) is state

        await self.until(reached)
        return self.held(instance_id)

    def a_hold(
        self,
        instance_id: str = INSTANCE,
        generation: int = 1,
        draining: bool = False,
        size: int = ROOM // 2,
        drain_within_s: float | None = None,
    ) -> Hold:
        return Hold(
            instance_id=InstanceId(instance_id),
            generation=Generation(generation),
            model=self.model,
            stage=self.model.spec.whole,
            device_bytes=size,
            draining=draining,
            drain_within_s=drain_within_s,
        )

    async def command(self, *holds: Hold, epoch: int | None = None, sent: Moment | None = None) -> None:
        message = WorkerHold(worker_id=WORKER, epoch=Epoch(epoch if epoch is not None else self.epoch), holds=holds, sent=sent)
        await self.bus.publish(worker_hold_subject(WORKER), message)

    async def ready(self) -> None:
        await self.command(self.a_hold())
        await self.state(HeldState.READY)

    async def submit(self, request_id: str = "req-1", max_tokens: int = 4, **other: Any) -> SubmitReply:
        submit = Submit(
            request_id=RequestId(request_id),
            attempt=other.pop("attempt", 1),
            gateway_id=GATEWAY,
            instance_id=INSTANCE,
            model=ModelName("tiny"),
            prompt_ids=other.pop("prompt_ids", [1, 2, 3]),
            sampling=Sampling(
                seed=5, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=other.pop("grammar", None)
            ),
            **other,
        )
        return await self.bus.request(submit_subject(WORKER), submit, SubmitReply, deadline_s=2.0)

    def of(self, request_id: str = "req-1") -> list[TokenEntry]:
        return [entry for entry in self.entries if entry.request_id == request_id]

    async def finish_of(self, request_id: str = "req-1") -> TokenEntry:
        return await self.until(lambda: next((entry for entry in self.of(request_id) if entry.finish), None))

    async def ack(self, seq: int, done: bool = False, request_id: str = "req-1") -> None:
        entry = AckEntry(request_id=RequestId(request_id), attempt=1, seq=seq, done=done)
        await self.bus.publish(ack_subject(WORKER), Ack(gateway_id=GATEWAY, entries=[entry]))

    async def resend(self, from_seq: int, request_id: str = "req-1") -> TokenBatch:
        ask = Resend(request_id=RequestId(request_id), attempt=1, from_seq=from_seq)
        return await self.bus.request(resend_subject(WORKER), ask, TokenBatch, deadline_s=2.0)

    async def give_up(self, *instance_ids: str) -> tuple[str, ...]:
        ask = GiveUp(instance_ids=tuple(InstanceId(name) for name in instance_ids))
        return (await self.bus.request(give_up_subject(WORKER), ask, GivenUp, deadline_s=5.0)).instance_ids

    async def cancel(self, request_id: str = "req-1") -> None:
        await self.bus.publish(cancel_subject(WORKER), Cancel(gateway_id=GATEWAY, request_ids=[RequestId(request_id)]))

    def expected(self, first: int, stop: int, output: tuple[int, ...] = ()) -> list[int]:
        """Output tokens of [first, stop) after an output so far."""
        given = list(output)
        tokens = SimTokens.after(5, [1, 2, 3, *given], self.model.spec.vocab_size)
        while len(given) < stop:
            given.append(tokens.next()[0])
            tokens.take(given[-1])
        return given[first:]


MakeRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def make_rig(make_context: Any, connect_bus: Any, leases: Any, model: Any, tmp_path: Path) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    async def make(step_s: float = 0.001, process: bool = False, max_requests: int = 8, pool_path: Path | None = None) -> Rig:
        context = make_context("worker", WorkerSettings())
        engine: EngineClient
        if process:
            engine = ProcessEngine(ChildOptions(threads=1, log_path=tmp_path / "engine.log"))
        else:
            profile = SimProfile(load_bytes_per_s=1e9, prefill_tokens_per_s=1e6, decode_step_s=step_s)
            engine = SimEngine(profile, context.clock)
        core = WorkerCore(
            worker_id=WORKER,
            node_id=NodeId("node-1"),
            device_bytes=ROOM,
            engine=engine,
            table=RequestTable(max_requests),
            bus=context.bus,
            clock=context.clock,
            background=context.background,
            metrics=WorkerMetrics(context.metrics),
            phases=PhaseReporter(context.bus, context.clock, context.background, "worker"),
            vocabularies=Vocabularies(context.store),
        )
        bucket = await context.bus.bucket(WORKERS)
        kind = DeviceKind.CPU if process else DeviceKind.SIM
        worker = Worker(core, kind, StageLoader(core, leases, pool_path), bucket, context.incarnation)
        rig = Rig(worker, await connect_bus("gateway"), model)
        rigs.append(rig)
        await rig.listen()
        await worker.start()
        await rig.until(lambda: rig.facts)
        return rig

    yield make
    for rig in rigs:
        await rig.worker.stop()


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
    await rig.until(lambda: {PhaseName.INIT, PhaseName.LOAD, PhaseName.PREFILL} <= rig.phases.keys())
    (prefill,) = rig.phases[PhaseName.PREFILL]
    assert all(phase.end_s <= prefill.start_s for phase in rig.phases[PhaseName.LOAD])


@pytest.mark.parametrize("process", [False, True])
async def test_phases_touch_from_the_command_to_the_first_token(make_rig: MakeRig, process: bool) -> None:
    """Whatever the messages between two processes take belongs to the phase that they lead to."""
    rig = await make_rig(process=process)
    now = moment_of(SystemClock())
    sent = Moment(at_s=now.at_s - 0.2, wall_offset_s=now.wall_offset_s)
    await rig.command(rig.a_hold(), sent=sent)
    held = await rig.state(HeldState.READY)
    submitted_s = SystemClock().monotonic_s()
    await rig.submit()
    await rig.finish_of()
    await rig.until(lambda: {PhaseName.INIT, PhaseName.LOAD, PhaseName.PREFILL} <= rig.phases.keys())
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
    assert 0 <= rig.first_sampled.at_s - prefill.end_s < (1e-9 if process else 0.1)


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
    rig = await make_rig()
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
async def test_a_deadline_ends_a_request_with_its_error_and_frees_its_room(make_rig: MakeRig, process: bool) -> None:
    rig = await make_rig(process=process)
    await rig.ready()
    await rig.submit("req-other", max_tokens=200)
    await rig.submit("req-none", max_tokens=200, deadline_in_s=0.0)
    await rig.submit("req-late", max_tokens=200, deadline_in_s=0.05)
    await rig.submit("req-in-time", max_tokens=5, deadline_in_s=60.0)
    none, late, other = [await rig.finish_of(name) for name in ("req-none", "req-late", "req-other")]
    for entry in (none, late):
        assert (entry.finish, entry.code) == (FinishReason.ERROR, "deadline_exceeded")
    tokens = {
        name: [token for entry in rig.of(name) for token in entry.token_ids] for name in ("req-none", "req-late", "req-other")
    }
    assert tokens["req-none"] == []
    assert late.message == f"the deadline passed after {len(tokens['req-late'])} output tokens"
    assert len(tokens["req-late"]) < 200
    assert len(tokens["req-other"]) == 200, "the others have their time"
    assert other.finish is (await rig.finish_of("req-in-time")).finish is FinishReason.LENGTH
    assert tokens["req-other"][: len(tokens["req-late"])] == tokens["req-late"]
    assert rig.worker.core.table.running == 0
    await rig.until(lambda: rig.facts and rig.held() and rig.facts.kv_free_tokens == rig.held().kv_capacity_tokens)


async def test_a_simulated_worker_refuses_a_grammar_by_name(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    await rig.submit("req-other", max_tokens=20)
    await rig.submit(grammar=Grammar(kind=GrammarKind.REGEX, text="a+"))
    refused = await rig.finish_of()
    assert (refused.finish, refused.code, refused.token_ids) == (FinishReason.ERROR, "invalid_request", [])
    assert "simulated worker" in refused.message
    assert (await rig.finish_of("req-other")).finish is FinishReason.LENGTH
    assert rig.worker.core.table.running == 0


async def test_refusals_say_why_and_when_to_retry(make_rig: MakeRig, leases: Any) -> None:
    rig = await make_rig(max_requests=1)
    refused = await rig.submit()
    assert (refused.accepted, refused.code) == (False, "not_loaded")
    assert refused.retry_after_s > 0
    await rig.ready()
    assert (await rig.submit(prompt_ids=[1] * 256)).code == "context_length_exceeded"
    assert (await rig.submit("req-1", max_tokens=200)).accepted
    full = await rig.submit("req-2")
    assert (full.code, full.retry_after_s > 0) == ("queue_full", True)
    await rig.cancel()


@pytest.mark.parametrize("process", [False, True])
async def test_a_stage_takes_requests_while_it_loads(make_rig: MakeRig, leases: Any, process: bool) -> None:
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
    assert not rig.worker.stages.busy, "nothing is expected of the engine"
    assert await rig.give_up(INSTANCE) == (), "it is wanted"
    leases.gate.set()
    ready = await rig.state(HeldState.READY)
    assert ready is not None
    assert not ready.open
    for name in ("req-1", "req-2"):
        assert (await rig.finish_of(name)).finish is FinishReason.LENGTH
    tokens = [[token for entry in rig.of(name) for token in entry.token_ids] for name in ("req-1", "req-2")]
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
        assert (last.finish, last.code) == (FinishReason.ERROR, "engine_failed" if how == "engine" else "not_loaded")
        assert [token for entry in rig.of(name) for token in entry.token_ids] == [], "also where every part was placed"
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
    await rig.until(lambda: any(entry.attempt == 2 and entry.finish is FinishReason.LENGTH for entry in rig.of()))


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
    await until(lambda: sum(len(produced.token_ids) for produced, _ in rig.worker._unproven.get(INSTANCE, [])) == 4)
    leases.intact = intact
    assert rig.entries == []
    assert (await rig.resend(0)).entries == []
    leases.may_end.set()
    last = await rig.finish_of()
    tokens = [token for entry in rig.of() for token in entry.token_ids]
    assert (last.code, len(tokens)) == (("", 4) if intact else ("not_loaded", 0))


async def test_a_stage_of_several_takes_no_requests_while_it_loads(make_rig: MakeRig, leases: Any) -> None:
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


async def test_an_older_epoch_is_refused(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.command(rig.a_hold(), epoch=5)
    await rig.state(HeldState.READY)
    await rig.command(epoch=4)
    await rig.command(rig.a_hold(), rig.a_hold("inst-2", size=ROOM // 4), epoch=5)
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held() is not None
    assert rig.epoch_seen == 5
    await rig.command(epoch=6)
    await rig.state(None)


async def test_a_worker_that_starts_anew_refuses_what_its_loader_would(make_rig: MakeRig, tmp_path: Path) -> None:
    """Before its first lease too: the worker that it follows may have obeyed a newer leader."""
    pool = HostPool.open(tmp_path / "x.pool", 64 * 2**20, SystemClock())
    pool.raise_epoch(Epoch(5))
    rig = await make_rig(pool_path=tmp_path / "x.pool")
    await rig.command(rig.a_hold("inst-old"), epoch=4)
    await rig.command(rig.a_hold(), epoch=5)
    await rig.state(HeldState.READY)
    assert rig.held("inst-old") is None
    assert rig.epoch_seen == 5
    pool.close(remove=True)


async def test_give_up_is_refused_in_flight_and_sticks_when_idle(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    await rig.submit(max_tokens=200)
    assert await rig.give_up(INSTANCE) == ()
    await rig.cancel()
    await rig.until(lambda: rig.worker.core.table.running == 0)
    assert await rig.give_up(INSTANCE, "inst-unknown") == (INSTANCE,)
    evicted = await rig.state(HeldState.EVICTED)
    assert evicted is not None
    assert evicted.device_bytes == 0
    assert evicted.reason
    assert (await rig.submit("req-2")).code == "not_loaded"
    assert await rig.give_up(INSTANCE) == (INSTANCE,), "asked again, because the answer was lost"
    await rig.command(rig.a_hold(), rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held().state is HeldState.EVICTED  # type: ignore[union-attr]
    await rig.command(rig.a_hold("inst-2"))
    await rig.state(None)
    await rig.command(rig.a_hold(), rig.a_hold("inst-2"), rig.a_hold("inst-3", size=1 << 18))
    await rig.state(HeldState.READY, "inst-3")
    assert rig.held() is None, "the given up is not loaded by a late command"


async def test_draining_ends_requests_first(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    await rig.submit(max_tokens=50)
    await rig.command(rig.a_hold(draining=True))
    await rig.state(HeldState.DRAINING)
    assert (await rig.submit("req-2")).code == "not_loaded"
    last = await rig.finish_of()
    assert last.finish is FinishReason.LENGTH
    await rig.state(None)
    await rig.command(rig.a_hold(draining=True), rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held() is None


async def test_a_request_that_outlasts_its_drain_can_go_on_elsewhere(make_rig: MakeRig) -> None:
    rig = await make_rig(step_s=0.01)
    await rig.ready()
    await rig.submit(max_tokens=100_000)
    await rig.until(lambda: rig.of())
    await rig.command(rig.a_hold(generation=2, draining=True, drain_within_s=0.0))
    last = await rig.finish_of()
    assert (last.finish, last.code) == (FinishReason.ERROR, "not_loaded")
    await rig.state(None)
    await rig.command(rig.a_hold("inst-2"))
    await rig.state(HeldState.READY, "inst-2")


async def test_a_load_that_is_not_wanted_any_more_is_called_off(make_rig: MakeRig, leases: Any) -> None:
    rig = await make_rig()
    leases.gate.clear()
    await rig.command(rig.a_hold(size=ROOM))
    await rig.state(HeldState.LOADING)
    await rig.until(lambda: leases.open == 1)
    await rig.command(rig.a_hold("inst-2", size=ROOM))
    leases.gate.set()
    await rig.state(HeldState.READY, "inst-2")
    assert rig.held() is None


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


async def test_stopping_tells_the_gateways_of_what_runs(make_rig: MakeRig) -> None:
    rig = await make_rig()
    await rig.ready()
    await rig.submit(max_tokens=200)
    await rig.until(lambda: rig.of())
    await rig.worker.stop()
    last = await rig.finish_of()
    assert (last.finish, last.code) == (FinishReason.ERROR, "worker_lost")


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_the_engines_death_in_mid_stream(make_rig: MakeRig, process: bool) -> None:
    rig = await make_rig(process=process)
    await rig.ready()
    await rig.submit(max_tokens=200)
    await rig.until(lambda: rig.of())
    engine = rig.worker.core.engine
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
    assert last.seq + len(last.token_ids) == len(received), "no token was skipped or repeated before the end"
    assert (await rig.resend(0)).entries[0].token_ids == received

    await rig.command(rig.a_hold("inst-1", generation=2))
    await rig.until(lambda: rig.facts and rig.facts.engine_up)
    await rig.state(HeldState.READY)
    resumed = await rig.submit(attempt=2, max_tokens=len(received) + 4, output_ids=received)
    assert resumed.accepted
    more = await rig.until(lambda: next((entry for entry in rig.of() if entry.attempt == 2 and entry.finish), None))
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
async def test_two_hundred_simulated_workers_in_one_process(make_context: Any, connect_bus: Any) -> None:
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
