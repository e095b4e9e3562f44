"""A worker with two kinds of engine, as a scheduler and a gateway see it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.common.messages.engine import (
    Produced,
    StepDone,
)
from pilotlight.common.messages.hold import Hold, WorkerHold, worker_hold_subject
from pilotlight.common.messages.reports import WORKER_REPORTS, WorkerReport
from pilotlight.common.messages.tokens import (
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    submit_subject,
    tokens_subject,
)
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import (
    Epoch,
    GatewayId,
    Generation,
    InstanceId,
    ModelName,
    RequestId,
)
from pilotlight.policy.model import EngineKind, Model
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.app import build
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.worker import Worker

pytestmark = pytest.mark.anyio
DEADLINE_S = 10.0
NATIVE, SIM = EngineKind.NATIVE, EngineKind.SIM


class Observer:
    """What a scheduler and a gateway see of one worker."""

    def __init__(self, bus: Any, worker: Worker) -> None:
        self.bus, self.worker = bus, worker
        self.states: dict[str, HeldState] = {}
        self.entries: list[TokenEntry] = []
        self._news = asyncio.Event()

    async def listen(self) -> None:
        await self.bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_report)
        await self.bus.subscribe(
            tokens_subject(GatewayId("gw-1")), TokenBatch, self._on_tokens, binary=True
        )

    async def _on_report(self, report: WorkerReport) -> None:
        self.states = {held.instance_id: held.state for held in report.facts.held}
        self._news.set()

    async def _on_tokens(self, batch: TokenBatch) -> None:
        self.entries += batch.entries
        self._news.set()

    async def until(self, holds: Callable[[], Any]) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while not (result := holds()):
                await self._news.wait()
                self._news.clear()
        return result

    async def hold(self, *models: Model, generation: int = 1) -> None:
        holds = tuple(
            Hold(
                instance_id=InstanceId(model.name),
                generation=Generation(generation),
                model=model,
                stage=model.spec.whole,
                device_bytes=1 << 19,
            )
            for model in models
        )
        worker_id = self.worker.core.worker_id
        await self.bus.publish(
            worker_hold_subject(worker_id),
            WorkerHold(worker_id=worker_id, epoch=Epoch(1), holds=holds),
        )

    async def submit(self, model: Model, max_tokens: int, name: str = "") -> None:
        submit = Submit(
            request_id=RequestId(f"{name} to {model.name}".strip()),
            attempt=1,
            gateway_id=GatewayId("gw-1"),
            instance_id=InstanceId(model.name),
            model=model.name,
            prompt_ids=[1, 2, 3],
            sampling=Sampling(seed=5, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        reply = await self.bus.request(
            submit_subject(self.worker.core.worker_id), submit, SubmitReply, deadline_s=2.0
        )
        assert reply.accepted

    async def end_of(self, model: Model, name: str = "") -> TokenEntry:
        def ended() -> TokenEntry | None:
            mine = (
                entry
                for entry in self.entries
                if entry.request_id == f"{name} to {model.name}".strip()
            )
            return next((entry for entry in mine if entry.finish), None)

        return await self.until(ended)


async def test_a_worker_serves_models_of_two_engines_and_loses_only_what_died(
    make_context: Any, connect_bus: Any, model: Model
) -> None:
    """On a simulated device both kinds are simulated, each by an engine of its own."""
    one, two = (
        replace(model, name=ModelName(name), engine=kind)
        for name, kind in (("one", NATIVE), ("two", SIM))
    )
    settings = WorkerSettings(node_id="node-1", device_bytes=1 << 20, sim_decode_step_s=0.001)
    (worker,) = (await build(make_context("worker", settings), simulated=1)).components
    assert isinstance(worker, Worker)
    observer = Observer(await connect_bus("observer"), worker)
    await observer.listen()
    await worker.start()
    try:
        await observer.hold(one, two)
        await observer.until(
            lambda: observer.states == {"one": HeldState.READY, "two": HeldState.READY}
        )
        await observer.submit(one, 200)
        await observer.submit(two, 200)
        await observer.until(
            lambda: {entry.request_id for entry in observer.entries} == {"to one", "to two"}
        )
        await worker.core.engine._engines[SIM].kill("a test")
        lost = await observer.end_of(two)
        assert (lost.finish, lost.code) == (FinishReason.ERROR, "engine_failed")
        assert (await observer.end_of(one)).finish is FinishReason.LENGTH
        await observer.until(
            lambda: observer.states == {"one": HeldState.READY, "two": HeldState.FAILED}
        )
        assert (worker._starts._failures, worker._starts.busy) == (0, False), (
            "nothing is wrong with the main engine"
        )
        await observer.hold(one, two, generation=2)
        await observer.until(
            lambda: observer.states == {"one": HeldState.READY, "two": HeldState.READY}
        )
        await observer.submit(one, 200, "long")
        await observer.submit(two, 200, "wrong")
        wrong = Produced(
            request_id=RequestId("wrong to two"), attempt=1, position=999, token_ids=[1]
        )
        step = StepDone(produced=(wrong,), waiting=0, running=1, kv_free_tokens=0, step_time_s=0.0)
        await worker.core.engine._engines[SIM]._say(step)
        assert (await observer.end_of(two, "wrong")).code == "engine_failed"
        assert (await observer.end_of(one, "long")).finish is FinishReason.LENGTH, (
            "only the engine that talks nonsense ends"
        )
    finally:
        await worker.stop()
