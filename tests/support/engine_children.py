"""Engines in processes of their own, without a worker, and everything that they say."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pilotlight.common.messages.engine import (
    Abort,
    LoadStage,
    PlacePart,
    Run,
    StageLoaded,
    StageRefused,
    StepDone,
)
from pilotlight.common.messages.pipelines import KvAt
from pilotlight.policy.ids import InstanceId, NodeId, RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine

INSTANCE = InstanceId("inst-1")
HOST = "127.0.0.1"
WAIT_S = 120.0
KV_TOKENS = 8192
SAMPLING = Sampling(seed=5, max_tokens=8000, temperature=0.8, ignore_eos=True)


class Child:
    """An engine in a process, and everything that it has said."""

    def __init__(self, engine: ProcessEngine, name: str) -> None:
        self.engine = engine
        self.node_id = NodeId(name)
        self.said: list[Any] = []
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, FinishReason] = {}
        self.steps: list[StepDone] = []
        self.heard = asyncio.Condition()

    async def listen(self) -> None:
        async for told in self.engine.events():
            async with self.heard:
                self._hear(told.message)
                self.heard.notify_all()

    def _hear(self, event: Any) -> None:
        if not isinstance(event, StepDone):
            self.said.append(event)
            return
        self.steps.append(event)
        for produced in event.produced:
            if produced.code:
                self.ends[produced.request_id] = FinishReason.ERROR
                continue
            assert produced.position == len(self.tokens[produced.request_id])
            self.tokens[produced.request_id] += produced.token_ids
            if produced.finish is not None:
                self.ends[produced.request_id] = produced.finish

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.heard:
            await self.heard.wait_for(holds)

    async def says(self, kind: type) -> Any:
        """The first one of this kind; it is not found again."""
        await self.until(lambda: any(isinstance(event, kind | StageRefused) for event in self.said))
        found = next(event for event in self.said if isinstance(event, kind | StageRefused))
        self.said.remove(found)
        assert isinstance(found, kind), found
        return found

    async def refuses(self) -> StageRefused:
        """As ``says``."""
        await self.until(lambda: any(isinstance(event, StageRefused) for event in self.said))
        found = next(event for event in self.said if isinstance(event, StageRefused))
        self.said.remove(found)
        return found

    async def speaks(self, request_id: str, count: int) -> None:
        """Waits for ``count`` tokens more."""
        wanted = len(self.tokens[request_id]) + count
        await self.until(lambda: len(self.tokens[request_id]) >= wanted)


@asynccontextmanager
async def child(folder: Path, name: str) -> AsyncIterator[Child]:
    made = Child(ProcessEngine(ChildOptions(threads=1, log_path=folder / f"{name}.log")), name)
    listening = asyncio.create_task(made.listen())
    await made.engine.start()
    try:
        yield made
    finally:
        await made.engine.stop()
        await listening


def bytes_of(pool: Any, stage: Stage) -> int:
    model = pool.model
    return model.device_bytes(stage) + KV_TOKENS * model.spec.kv_bytes_per_token(stage, model.dtype)


async def load(one: Child, pool: Any, stage: Stage, instance_id: InstanceId = INSTANCE) -> None:
    await one.engine.load_stage(
        LoadStage(
            instance_id=instance_id,
            model=pool.model,
            stage=stage,
            device_bytes=bytes_of(pool, stage),
            pool_path=str(pool.path),
        )
    )
    await place(one, pool, pool.model.spec.parts_of(stage), instance_id)
    await one.says(StageLoaded)


async def place(
    one: Child, pool: Any, parts: Iterable[int], instance_id: InstanceId = INSTANCE
) -> None:
    for part in parts:
        await one.engine.place_part(
            PlacePart(instance_id=instance_id, part=part, tensors=pool.parts[part])
        )


async def speak(
    one: Child, request_id: str, sampling: Sampling, instance_id: InstanceId = INSTANCE
) -> None:
    await one.engine.run(
        Run(
            request_id=RequestId(request_id),
            attempt=1,
            instance_id=instance_id,
            prompt_ids=[*range(1, 70)],
            output_ids=[],
            sampling=sampling,
        )
    )


async def stopped(one: Child, request_id: str) -> list[int]:
    """What was said of a request that nobody wants any more."""
    await one.engine.abort(Abort(request_id=RequestId(request_id), attempt=1))
    await one.until(lambda: one.ends.get(request_id) is FinishReason.CANCELLED)
    return one.tokens[request_id]


async def go_on(one: Child, request_id: str, outputs: list[int], kv_at: KvAt | None = None) -> None:
    """With what another engine said."""
    one.tokens[request_id] = list(outputs)
    await one.engine.run(
        Run(
            request_id=RequestId(request_id),
            attempt=1,
            instance_id=INSTANCE,
            prompt_ids=[*range(1, 70)],
            output_ids=outputs,
            sampling=SAMPLING,
            kv_at=kv_at,
        )
    )


async def tokens_alone(one: Child, pool: Any, count: int) -> list[int]:
    """What an engine says that has the model whole."""
    alone = InstanceId("alone")
    await load(one, pool, pool.model.spec.whole, alone)
    await speak(
        one, "alone", Sampling(seed=5, max_tokens=count, temperature=0.8, ignore_eos=True), alone
    )
    await one.until(lambda: "alone" in one.ends)
    return one.tokens["alone"]
