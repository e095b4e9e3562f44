"""What serving talks to, for its tests: a worker that answers by script, and a node's loader."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.bus import Bus, Subscription
from pilotlight.common.errors import NotFound
from pilotlight.common.ids import new_incarnation
from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
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
from pilotlight.common.waiting import every
from pilotlight.policy.cluster import (
    Device,
    DeviceKind,
    HeldStage,
    HeldState,
    Liveness,
    NodeFacts,
    Transfer,
    WorkerFacts,
)
from pilotlight.policy.ids import (
    DecisionId,
    Epoch,
    Generation,
    InstanceId,
    NodeId,
    RequestId,
    WorkerId,
)
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.phase import Moment
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.policy.request import FinishReason

NODE = NodeId("node-0")


@dataclass(slots=True)
class Ran:
    """One submit that a scripted worker took."""

    submit: Submit
    entries: list[TokenEntry]
    acked_seq: int = 0
    done: bool = False
    cancelled: bool = False


Script = Callable[[Submit], list[TokenEntry]]
Post = Callable[[Ran], Iterable[TokenEntry]]


def entries_of(
    submit: Submit, token_ids: list[int], finish: FinishReason | None = FinishReason.STOP
) -> list[TokenEntry]:
    """An output of which ``submit`` may already have a part: one token an entry, then the end."""
    key: dict[str, Any] = {"request_id": submit.request_id, "attempt": submit.attempt}
    wanted = token_ids[: submit.sampling.max_tokens]
    entries = [
        TokenEntry(
            seq=seq,
            token_ids=[wanted[seq]],
            logprobs=[-0.5] if submit.sampling.logprobs else None,
            **key,
        )
        for seq in range(len(submit.output_ids), len(wanted))
    ]
    if len(wanted) < len(token_ids):
        finish = FinishReason.LENGTH
    if finish is not None:
        entries.append(TokenEntry(seq=len(wanted), token_ids=[], finish=finish, **key))
    return entries


class ScriptedWorker:
    """Speaks a worker's protocol on a real bus: what it says, and what of it is lost on the way, is
    scripted.

    ``script`` makes the entries of a submit, ``post`` chooses which of them are sent and in what
    order; all of them can be had by resend, but for what an instance that loads has not made yet:
    what was not sent.
    """

    def __init__(
        self, bus: Bus, worker_id: str, instance_id: str, model: Model, script: Script
    ) -> None:
        self.worker_id = WorkerId(worker_id)
        self.script = script
        self.post: Post = lambda ran: ran.entries
        self.refuse: list[SubmitReply] = []
        """Answers to the next submits, before any is accepted."""
        self.ran: dict[tuple[RequestId, int], Ran] = {}
        self.submits: list[Submit] = []
        self.resends: list[Resend] = []
        self.changed = asyncio.Condition()
        """Notified whenever something was heard."""
        self.answers_resend = True
        self.kv_capacity_tokens = 0
        self.held_state = HeldState.READY
        self.shown: Moment | None = None
        """When the instance is said to have been shown as ready, and its tokens to have been
        sampled."""
        self.sampled: Moment | None = None
        self.incarnation = new_incarnation()
        self.instance = Instance(
            instance_id=InstanceId(instance_id),
            model=model.name,
            digest=model.digest,
            state=InstanceState.READY,
            generation=Generation(1),
            epoch=Epoch(1),
            placements=(
                Placement(
                    worker_id=self.worker_id, node_id=NODE, stage=Stage(0, 2), device_bytes=1000
                ),
            ),
            decision_id=DecisionId("dec-0"),
            state_since_s=0.0,
            last_used_s=0.0,
        )
        self._bus = bus
        self._subscriptions: list[Subscription] = []
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve and report."""
        bus, worker_id = self._bus, self.worker_id
        self._subscriptions = [
            await bus.serve(submit_subject(worker_id), Submit, self._on_submit),
            await bus.serve(resend_subject(worker_id), Resend, self._on_resend),
            await bus.subscribe(ack_subject(worker_id), Ack, self._on_ack),
            await bus.subscribe(cancel_subject(worker_id), Cancel, self._on_cancel),
        ]
        self._reporting = asyncio.create_task(self._report_for_ever())

    async def ready(self, state: InstanceState = InstanceState.READY) -> None:
        """Publish that the instance is there (the scheduler's part)."""
        if state is InstanceState.READY:
            self.held_state = HeldState.READY
        self.instance = replace(self.instance, state=state)
        await (await self._bus.bucket(INSTANCES)).put(
            self.instance.instance_id, self.instance, sent=self.shown
        )

    async def loading(self) -> None:
        """Publish that the instance loads, and that it takes requests already."""
        self.held_state = HeldState.LOADING
        await self.ready(InstanceState.LOADING)
        await self.report()

    async def die(self) -> None:
        """Be silent for ever."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
            self._reporting = None
        for subscription in self._subscriptions:
            await subscription.end()
        self._subscriptions.clear()

    async def declare_dead(self) -> None:
        """What its loader says when its socket closes."""
        await self._bus.publish(
            loader_report_subject(NODE), loader_report(dead_workers=(self.worker_id,))
        )

    async def report(self) -> None:
        """Publish one report."""
        await self._bus.publish(worker_report_subject(self.worker_id), self._report())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that was heard makes this true."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    async def send(self, ran: Ran, entries: Iterable[TokenEntry]) -> None:
        """Send entries, each as a batch of its own."""
        for entry in entries:
            batch = TokenBatch(worker_id=self.worker_id, entries=[entry])
            await self._bus.publish(
                tokens_subject(ran.submit.gateway_id), batch, binary=True, sent=self.sampled
            )

    def _report(self) -> WorkerReport:
        held = HeldStage(
            instance_id=self.instance.instance_id,
            generation=Generation(1),
            model=self.instance.model,
            digest=self.instance.digest,
            stage=Stage(0, 2),
            state=self.held_state,
            device_bytes=1000,
            kv_capacity_tokens=self.kv_capacity_tokens,
            open=self.held_state is HeldState.LOADING,
        )
        facts = WorkerFacts(
            worker_id=self.worker_id,
            node_id=NODE,
            device=Device(
                kind=DeviceKind.SIM, name="sim", memory_bytes=1 << 30, load_bytes_per_s=1e9
            ),
            liveness=Liveness.ALIVE,
            held=(held,),
            kv_free_tokens=1_000_000,
        )
        return WorkerReport(facts=facts, incarnation=self.incarnation, epoch_seen=Epoch(1))

    async def _report_for_ever(self) -> None:
        async for _ in every(0.1):
            await self.report()

    async def _on_submit(self, submit: Submit) -> SubmitReply:
        key = (submit.request_id, submit.attempt)
        if key in self.ran:
            return SubmitReply(accepted=True)
        if self.refuse:
            return self.refuse.pop(0)
        ran = self.ran[key] = Ran(submit, self.script(submit))
        self.submits.append(submit)
        await self.send(ran, self.post(ran))
        await self._tell()
        return SubmitReply(accepted=True)

    async def _on_resend(self, resend: Resend) -> TokenBatch:
        self.resends.append(resend)
        ran = self.ran.get((resend.request_id, resend.attempt))
        if ran is None or not self.answers_resend:
            raise NotFound
        made = self.post(ran) if self.held_state is HeldState.LOADING else ran.entries
        entries = [entry for entry in made if entry.seq >= resend.from_seq]
        await self._tell()
        return TokenBatch(worker_id=self.worker_id, entries=entries)

    async def _on_ack(self, ack: Ack) -> None:
        for entry in ack.entries:
            self._take_ack(entry)
        await self._tell()

    def _take_ack(self, entry: AckEntry) -> None:
        ran = self.ran.get((entry.request_id, entry.attempt))
        if ran is not None:
            ran.acked_seq = max(ran.acked_seq, entry.seq)
            ran.done = ran.done or entry.done

    async def _on_cancel(self, cancel: Cancel) -> None:
        for (request_id, _), ran in self.ran.items():
            ran.cancelled = ran.cancelled or request_id in cancel.request_ids
        await self._tell()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def loader_report(
    *, transfers: tuple[Transfer, ...] = (), dead_workers: tuple[WorkerId, ...] = ()
) -> LoaderReport:
    """What the one node's loader says."""
    facts = NodeFacts(
        node_id=NODE,
        host="localhost",
        liveness=Liveness.ALIVE,
        nic_bytes_per_s=1e9,
        pool_bytes=1 << 30,
        pool_free_bytes=1 << 30,
        transfers=transfers,
    )
    return LoaderReport(
        facts=facts, incarnation="loader-1", epoch_seen=Epoch(1), dead_workers=dead_workers
    )
