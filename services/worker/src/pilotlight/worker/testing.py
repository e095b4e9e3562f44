"""A worker's surroundings for tests: everyone that it talks to, on a real bus."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from pilotlight.common.bus import Bus
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.hold import Hold, WorkerHold, worker_hold_subject
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.room import (
    GivenUp,
    GiveUp,
    Lend,
    give_up_subject,
    lend_subject,
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
from pilotlight.policy.cluster import HeldStage, HeldState, WorkerFacts
from pilotlight.policy.ids import (
    Epoch,
    GatewayId,
    Generation,
    InstanceId,
    ModelName,
    RequestId,
    WorkerId,
)
from pilotlight.policy.lending import Loan
from pilotlight.policy.model import Model
from pilotlight.policy.phase import Moment, Phase, PhaseName
from pilotlight.policy.request import Sampling
from pilotlight.worker.engines.sim_tokens import SimTokens
from pilotlight.worker.worker import Worker

GATEWAY = GatewayId("gw-1")
WORKER = WorkerId("node-1-w0")
INSTANCE = InstanceId("inst-1")
ROOM = 1 << 20
CLUSTER_KEY = "the key of this cluster"
DEADLINE_S = 30.0
FAST_S, SLOW_S = 0.001, 0.02
"""Of a step. At the slow pace a request of 200 tokens still runs when a test, on whatever machine,
has seen its first."""


class Rig:
    """One worker, and everyone it talks to."""

    def __init__(self, worker: Worker, bus: Bus, model: Model) -> None:
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
        """Hear everything that the worker says."""
        await self.bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_report)
        await self.bus.subscribe(
            tokens_subject(GATEWAY), Timed[TokenBatch], self._on_tokens, binary=True
        )
        await self.bus.serve(PHASES_SUBJECT, PhaseReport, self._on_phases)

    async def _on_report(self, report: WorkerReport) -> None:
        self.facts, self.epoch_seen = report.facts, report.epoch_seen
        self._news.set()

    async def _on_tokens(self, told: Timed[TokenBatch]) -> None:
        self.first_sampled = told.sent if self.batches == 0 else self.first_sampled
        self.batches += 1
        self.entries += told.message.entries
        self._news.set()

    async def _on_phases(self, report: PhaseReport) -> PhasesKept:
        for phase in report.phases:
            self.phases.setdefault(phase.name, []).append(phase)
        self._news.set()
        return PhasesKept()

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until something has been heard."""
        async with asyncio.timeout(DEADLINE_S):
            while not (result := holds()):
                await self._news.wait()
                self._news.clear()
        return result

    def held(self, instance_id: str = INSTANCE) -> HeldStage | None:
        """The stage, as it was reported last."""
        return next(
            (
                one
                for one in (self.facts.held if self.facts else ())
                if one.instance_id == instance_id
            ),
            None,
        )

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
        """A command for the whole model."""
        return Hold(
            instance_id=InstanceId(instance_id),
            generation=Generation(generation),
            model=self.model,
            stage=self.model.spec.whole,
            device_bytes=size,
            draining=draining,
            drain_within_s=drain_within_s,
        )

    async def command(
        self, *holds: Hold, epoch: int | None = None, sent: Moment | None = None
    ) -> None:
        """Say what the worker is to hold, and nothing else."""
        message = WorkerHold(
            worker_id=WORKER, epoch=Epoch(epoch if epoch is not None else self.epoch), holds=holds
        )
        await self.bus.publish(worker_hold_subject(WORKER), message, sent=sent)

    async def ready(self) -> None:
        """Wait until the model is loaded."""
        await self.command(self.a_hold())
        await self.state(HeldState.READY)

    async def submit(
        self, request_id: str = "req-1", max_tokens: int = 4, **other: Any
    ) -> SubmitReply:
        """Ask as the gateway does."""
        submit = Submit(
            request_id=RequestId(request_id),
            attempt=other.pop("attempt", 1),
            gateway_id=GATEWAY,
            instance_id=other.pop("instance_id", INSTANCE),
            model=ModelName("tiny"),
            prompt_ids=other.pop("prompt_ids", [1, 2, 3]),
            sampling=Sampling(
                seed=5,
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                grammar=other.pop("grammar", None),
            ),
            **other,
        )
        return await self.bus.request(
            submit_subject(WORKER), submit, SubmitReply, deadline_s=DEADLINE_S
        )

    def of(self, request_id: str = "req-1") -> list[TokenEntry]:
        """What came of a request."""
        return [entry for entry in self.entries if entry.request_id == request_id]

    async def finish_of(self, request_id: str = "req-1") -> TokenEntry:
        """The last of it."""
        return await self.until(
            lambda: next((entry for entry in self.of(request_id) if entry.finish), None)
        )

    async def ack(self, seq: int, done: bool = False, request_id: str = "req-1") -> None:
        """Acknowledge tokens."""
        entry = AckEntry(request_id=RequestId(request_id), attempt=1, seq=seq, done=done)
        await self.bus.publish(ack_subject(WORKER), Ack(gateway_id=GATEWAY, entries=[entry]))

    async def resend(self, from_seq: int, request_id: str = "req-1") -> TokenBatch:
        """Ask for tokens again."""
        ask = Resend(request_id=RequestId(request_id), attempt=1, from_seq=from_seq)
        return await self.bus.request(
            resend_subject(WORKER), ask, TokenBatch, deadline_s=DEADLINE_S
        )

    async def give_up(self, *instance_ids: str) -> tuple[str, ...]:
        """Ask for room, as the cache does; what was given up."""
        ask = GiveUp(instance_ids=tuple(InstanceId(name) for name in instance_ids))
        return (
            await self.bus.request(give_up_subject(WORKER), ask, GivenUp, deadline_s=DEADLINE_S)
        ).instance_ids

    async def lend(self, **loans: int) -> None:
        """Lend KV, as the cache does; what is not named has no loan. ``inst_1`` is ``inst-1``."""
        given = tuple(
            Loan(instance_id=InstanceId(name.replace("_", "-")), num_bytes=num_bytes)
            for name, num_bytes in loans.items()
        )
        await self.bus.publish(lend_subject(WORKER), Lend(worker_id=WORKER, loans=given))

    async def lend_builds(self, **loans: int) -> None:
        """Be a cache that lends builds what they ask for, and stages always the same."""
        given = tuple(
            Loan(instance_id=InstanceId(name.replace("_", "-")), num_bytes=num_bytes)
            for name, num_bytes in loans.items()
        )

        async def hear(report: WorkerReport) -> None:
            build = report.facts.build
            if build.offered_bytes != build.wanted_bytes:
                lend = Lend(worker_id=WORKER, loans=given, build_bytes=build.wanted_bytes)
                await self.bus.publish(lend_subject(WORKER), lend)

        await self.bus.subscribe(WORKER_REPORTS, WorkerReport, hear)

    async def loan(
        self, holds: Callable[[HeldStage], bool], instance_id: str = INSTANCE
    ) -> HeldStage:
        """Wait until a stage's loan is reported so."""

        def reached() -> HeldStage | None:
            held = self.held(instance_id)
            return held if held is not None and holds(held) else None

        return await self.until(reached)

    async def cancel(self, request_id: str = "req-1") -> None:
        """End a request, as the gateway does."""
        await self.bus.publish(
            cancel_subject(WORKER), Cancel(gateway_id=GATEWAY, request_ids=[RequestId(request_id)])
        )

    def expected(self, first: int, stop: int, output: tuple[int, ...] = ()) -> list[int]:
        """Output tokens of [first, stop) after an output so far."""
        given = list(output)
        tokens = SimTokens.after(5, [1, 2, 3, *given], self.model.spec.vocab_size)
        while len(given) < stop:
            given.append(tokens.next()[0])
            tokens.take(given[-1])
        return given[first:]


MakeRig = Callable[..., Awaitable[Rig]]
