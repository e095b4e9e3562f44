"""An instance of two stages on two nodes: real loaders and workers, and the test in the place of
scheduler and gateway.

The holds are those that the scheduler sends: made of rows and reports by the policies, and told by
its ``Teller``.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from embedded_system import DEMO_FOLDER
from loader_processes import LoaderProcess, LoaderProcesses

from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.bus import Bus
from pilotlight.common.clock import SystemClock
from pilotlight.common.ids import worker_id_of
from pilotlight.common.messages.reports import (
    LOADER_REPORTS,
    WORKER_REPORTS,
    LoaderReport,
    WorkerReport,
)
from pilotlight.common.messages.tokens import (
    Ack,
    AckEntry,
    Cancel,
    Submit,
    SubmitReply,
    TokenBatch,
    ack_subject,
    cancel_subject,
    submit_subject,
    tokens_subject,
)
from pilotlight.common.roster import Roster
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import until
from pilotlight.common.waiting import cancel_all, every
from pilotlight.policy.cluster import HeldStage, HeldState
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.holds import fetches_of, stages_of, upstreams_at
from pilotlight.policy.control.plan import NodeTold, WorkerTold
from pilotlight.policy.control.reconcile import Change, moved
from pilotlight.policy.ids import Epoch, GatewayId, InstanceId, RequestId
from pilotlight.policy.instance import InstanceEvent
from pilotlight.policy.model import Dtype, Model, Stage
from pilotlight.policy.plan import InstanceState, Placement
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.policy.testing import instance
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.teller import Teller

pytestmark = [pytest.mark.anyio, pytest.mark.e2e]

GATEWAY = GatewayId("gw-1")
GROUP, ALONE = InstanceId("group"), InstanceId("alone")
KV_TOKENS = 2048
TELL_S = 0.2
DEADLINE_S = 90.0
PROMPT = [*range(100, 170)]
WORKERS = {
    "PILOTLIGHT_WORKERS": "1",
    "PILOTLIGHT_THREADS": "1",
    "PILOTLIGHT_SPARE_ENGINE": "false",
    "PILOTLIGHT_DEVICE_BYTES": str(512 << 20),
    # The stream lasts for as long as stages take to grow, on whatever machine.
    "PILOTLIGHT_FAULTS": "step=0.02",
}


@dataclass(eq=False)
class Rig:
    """What a scheduler and a gateway know of two nodes with a worker each."""

    bus: Bus
    model: Model
    loaders: list[LoaderProcess]
    roster: Roster = field(default_factory=Roster)
    book: Book = field(default_factory=Book)
    clock: SystemClock = field(default_factory=SystemClock)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[str, int], FinishReason] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node_ids = [one.node_id for one in self.loaders]
        self.worker_ids = [worker_id_of(node_id, 0) for node_id in self.node_ids]
        self.teller = Teller(self.bus, Epoch(1), self, self.clock)

    def check(self) -> None:
        """The one thing that the teller asks of a term: it has not ended."""

    async def listen(self) -> None:
        await self.bus.subscribe(WORKER_REPORTS, WorkerReport, self._on_worker)
        await self.bus.subscribe(LOADER_REPORTS, LoaderReport, self._on_loader)
        await self.bus.subscribe(tokens_subject(GATEWAY), TokenBatch, self._on_tokens, binary=True)

    async def _on_worker(self, report: WorkerReport) -> None:
        self.roster.hear_worker(report, self.clock.monotonic_s())

    async def _on_loader(self, report: LoaderReport) -> None:
        self.roster.hear_loader(report, self.clock.monotonic_s())

    async def _on_tokens(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            key = entry.request_id, entry.attempt
            so_far = self.tokens[key]
            assert entry.seq == len(so_far), "every token once, and in order"
            so_far += entry.token_ids
            if entry.finish is not None:
                self.ends[key] = entry.finish
            ack = AckEntry(request_id=entry.request_id, attempt=entry.attempt, seq=len(so_far))
            await self.bus.publish(
                ack_subject(batch.worker_id), Ack(gateway_id=GATEWAY, entries=[ack])
            )

    async def tell_for_ever(self) -> None:
        """Say over and over what nodes and workers are to hold."""
        async for _ in every(TELL_S):
            nodes = {
                one: facts for one in self.node_ids if (facts := self.roster.node(one)) is not None
            }
            workers = {
                one: view
                for one in self.worker_ids
                if (view := self.roster.worker(one)) is not None
            }
            upstreams = upstreams_at(nodes, self.book.books, nodes)
            for node_id in nodes:
                fetches = fetches_of(node_id, self.book.books, upstreams)
                await self.teller.tell_node(NodeTold(node_id=node_id, fetches=fetches), nodes)
            for worker_id in workers:
                told = WorkerTold(worker_id=worker_id, holds=stages_of(worker_id, self.book.books))
                await self.teller.tell_worker(told, nodes, workers)

    def placements(self, *stages: Stage | None) -> tuple[Placement, ...]:
        """A stage on each node; None: nothing."""
        per_token = {
            stage: self.model.spec.kv_bytes_per_token(stage, self.model.dtype)
            for stage in stages
            if stage
        }
        return tuple(
            Placement(
                worker_id=self.worker_ids[at],
                node_id=self.node_ids[at],
                stage=stage,
                device_bytes=self.model.device_bytes(stage) + KV_TOKENS * per_token[stage],
            )
            for at, stage in enumerate(stages)
            if stage is not None
        )

    def start(self, instance_id: InstanceId, *stages: Stage | None) -> None:
        """A row of a start."""
        one = replace(
            instance(
                self.model.name, instance_id, state=InstanceState.FETCHING, digest=self.model.digest
            ),
            placements=self.placements(*stages),
        )
        self.book.put(Record(instance=one, model=self.model))

    def change(self, *events: InstanceEvent, to: tuple[Placement, ...] = ()) -> None:
        """Move the row of the group."""
        record = self.book.get(GROUP)
        assert record is not None
        change = Change(instance_id=GROUP, events=events, reason="a test", placements=to)
        self.book.put(
            replace(
                record, instance=moved(record.instance, change, Epoch(1), self.clock.monotonic_s())
            )
        )

    def held(self, at: int, instance_id: InstanceId = GROUP) -> HeldStage | None:
        view = self.roster.worker(self.worker_ids[at])
        return view.held(instance_id) if view is not None else None

    def parts(self, at: int) -> set[int]:
        """Of the model, in a node's host pool."""
        facts = self.roster.node(self.node_ids[at])
        return {part for copy in (facts.copies if facts else ()) for part in copy.parts}

    async def accepted(self, at: int, request_id: str, attempt: int = 1, **more: Any) -> None:
        """Submit a request to a worker until it serves the instance."""
        submit = Submit(
            request_id=RequestId(request_id),
            attempt=attempt,
            gateway_id=GATEWAY,
            instance_id=more.pop("instance_id", GROUP),
            model=self.model.name,
            prompt_ids=PROMPT,
            output_ids=more.pop("output_ids", []),
            sampling=Sampling(
                seed=5, max_tokens=more.pop("max_tokens", 900), temperature=0.8, ignore_eos=True
            ),
        )

        async def takes() -> bool:
            reply = await self.bus.request(
                submit_subject(self.worker_ids[at]), submit, SubmitReply, deadline_s=10.0
            )
            assert reply.accepted or reply.code == "not_loaded", reply
            return reply.accepted

        await self.until(takes)

    async def speaks(self, key: tuple[str, int], count: int) -> None:
        """So many tokens more."""
        wanted = len(self.tokens[key]) + count
        await self.until(lambda: len(self.tokens[key]) >= wanted)

    async def cancelled(self, at: int, key: tuple[str, int]) -> list[int]:
        """End a request that goes on; what it has said."""
        said = list(self.tokens[key])
        assert key not in self.ends, "it was in mid-stream"
        cancel = Cancel(gateway_id=GATEWAY, request_ids=[RequestId(key[0])])
        await self.bus.publish(cancel_subject(self.worker_ids[at]), cancel)
        await self.until(lambda: not self.running(at))
        return said

    def running(self, at: int) -> int:
        """Requests on a worker, by its last report."""
        view = self.roster.worker(self.worker_ids[at])
        assert view is not None
        return view.facts.running_requests + view.facts.queue_requests

    async def said_alone(self, at: int, count: int) -> list[int]:
        """What one worker says that has the whole model from the beginning."""
        self.start(ALONE, *(self.model.spec.whole if here == at else None for here in range(2)))
        await self.accepted(at, "alone", instance_id=ALONE, max_tokens=count)
        await self.until(lambda: ("alone", 1) in self.ends)
        return self.tokens["alone", 1]

    async def until(self, holds: Callable[[], Any]) -> None:
        await until(holds, deadline_s=DEADLINE_S)


@pytest.fixture
async def rig(tmp_path: Path, bus: Bus, bus_settings: BusSettings) -> AsyncIterator[Rig]:
    """A group of two stages that serves."""
    nodes = LoaderProcesses(tmp_path, bus, bus_settings, roots=str(DEMO_FOLDER.parent))
    await nodes.listen()
    model = nodes.register_source(FolderSource(DEMO_FOLDER), DEMO_FOLDER.as_uri(), "m")
    # In float64 no batch rounds otherwise than another.
    made = Rig(
        bus,
        replace(model, dtype=Dtype.FLOAT64),
        [await nodes.start(name, **WORKERS) for name in ("first", "second")],
    )
    await made.listen()
    telling = asyncio.create_task(made.tell_for_ever())
    try:
        half = model.spec.num_layers // 2
        made.start(GROUP, Stage(0, half), Stage(half, model.spec.num_layers))
        for at in range(2):
            await made.until(
                lambda at=at: (held := made.held(at)) is not None and held.state is HeldState.READY
            )
        made.change(InstanceEvent.LOAD_STARTED, InstanceEvent.ALL_STAGES_READY)
        yield made
        assert not telling.done()
    finally:
        await cancel_all((telling,))
        await nodes.stop()


async def test_a_group_grows_to_one_worker_in_mid_stream(rig: Rig) -> None:
    spec = rig.model.spec
    half, whole = spec.num_layers // 2, spec.whole
    key = "request", 1
    await rig.accepted(0, "request")
    await rig.speaks(key, 10)
    assert rig.parts(0) == set(spec.parts_of(Stage(0, half))), "a node fetches what its stage needs"
    rig.change(
        InstanceEvent.CONSOLIDATION_STARTED, to=rig.placements(whole, Stage(half, spec.num_layers))
    )
    await rig.until(
        lambda: (held := rig.held(0)) is not None and (held.stage, held.generation) == (whole, 2)
    )
    assert rig.parts(0) == set(range(len(spec.part_bytes)))
    await rig.speaks(key, 10)
    rig.change(InstanceEvent.CONSOLIDATION_DONE, to=rig.placements(whole))
    await rig.until(lambda: rig.held(1) is None)
    await rig.speaks(key, 10)
    said = await rig.cancelled(0, key)
    assert await rig.said_alone(1, len(said)) == said


async def test_the_stage_that_follows_becomes_the_whole_and_the_request_goes_on_there(
    rig: Rig,
) -> None:
    spec = rig.model.spec
    half, whole = spec.num_layers // 2, spec.whole
    await rig.accepted(0, "request")
    await rig.speaks(("request", 1), 10)
    rig.change(InstanceEvent.CONSOLIDATION_STARTED, to=rig.placements(Stage(0, half), whole))
    await rig.until(
        lambda: (held := rig.held(1)) is not None and (held.stage, held.generation) == (whole, 2)
    )
    assert rig.parts(1) == set(range(len(spec.part_bytes)))
    await rig.speaks(("request", 1), 10)
    rig.change(InstanceEvent.CONSOLIDATION_DONE, to=rig.placements(None, whole))
    said = await rig.cancelled(0, ("request", 1))
    await rig.until(lambda: rig.held(0) is None)
    await rig.accepted(1, "request", attempt=2, output_ids=list(said))
    rig.tokens["request", 2] = list(said)
    await rig.speaks(("request", 2), 20)
    said = await rig.cancelled(1, ("request", 2))
    assert await rig.said_alone(0, len(said)) == said
