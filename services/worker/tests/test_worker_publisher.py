"""Token batches on a real NATS server: one message for each step and gateway, with everything that
the table has of its requests when it leaves.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pilotlight.common.clock import SystemClock
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.engine import Produced
from pilotlight.common.messages.tokens import (
    AckEntry,
    Submit,
    TokenBatch,
    TokenEntry,
    tokens_subject,
)
from pilotlight.common.service import Background
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.testing import until
from pilotlight.policy.ids import GatewayId, InstanceId, ModelName, RequestId, WorkerId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import FinishReason, Sampling
from pilotlight.worker import publisher as publishing
from pilotlight.worker.publisher import TokenPublisher
from pilotlight.worker.requests import RequestTable

pytestmark = pytest.mark.anyio

ONE, OTHER = GatewayId("gw-1"), GatewayId("gw-2")


def submit(
    request: str, gateway: GatewayId = ONE, earlier: int = 0, *, whole: bool = False
) -> Submit:
    return Submit(
        request_id=RequestId(request),
        attempt=1,
        gateway_id=gateway,
        instance_id=InstanceId("inst-1"),
        model=ModelName("m"),
        prompt_ids=[1, 2],
        output_ids=[9] * earlier,
        sampling=Sampling(seed=1, max_tokens=1 << 20, logprobs=True, top_logprobs=1),
        whole=whole,
    )


def entry_of(request: str, seq: int, *token_ids: int, **other: Any) -> TokenEntry:
    return TokenEntry(
        request_id=RequestId(request),
        attempt=1,
        seq=seq,
        token_ids=list(token_ids),
        logprobs=[-float(token) for token in token_ids],
        top_logprobs=[[(token, -float(token))] for token in token_ids],
        **other,
    )


class Steps:
    """A table, and a publisher that is told what steps gave its requests."""

    def __init__(self, publisher: TokenPublisher, table: RequestTable) -> None:
        self.publisher = publisher
        self.table = table

    def give(
        self,
        request: str,
        position: int,
        *token_ids: int,
        finish: FinishReason | None = None,
        sampled: Moment | None = None,
    ) -> None:
        produced = Produced(
            request_id=RequestId(request),
            attempt=1,
            position=position,
            token_ids=token_ids,
            logprobs=tuple(-float(token) for token in token_ids),
            top_logprobs=tuple(((token, -float(token)),) for token in token_ids),
            finish=finish,
        )
        unsent = self.table.produced(produced, 0.0)
        assert unsent is not None
        self.publisher.add(unsent, sampled)


class GatedBus:
    """A bus on which a message is on its way until the test lets it through."""

    def __init__(self) -> None:
        self.batches: list[TokenBatch] = []
        self.sending = asyncio.Event()
        self.gate = asyncio.Event()
        self.at_once = 0
        """Messages that it takes without waiting."""

    def publish_soon(self, subject: str, message: TokenBatch, **_: Any) -> bool:
        if self.at_once:
            self.at_once -= 1
            self.batches.append(message)
            return True
        return False

    async def publish(self, subject: str, message: TokenBatch, **_: Any) -> None:
        self.batches.append(message)
        self.sending.set()
        await self.gate.wait()


@pytest.fixture
def make_steps() -> Callable[..., Steps]:
    def make(bus: Any, background: Background) -> Steps:
        table = RequestTable(16)
        publisher = TokenPublisher(bus, SystemClock(), background, WorkerId("w"), table)
        return Steps(publisher, table)

    return make


async def received(
    bus: Any, gateway: GatewayId
) -> tuple[asyncio.Queue[Timed[TokenBatch]], Callable[[], Awaitable[Timed[TokenBatch]]]]:
    batches: asyncio.Queue[Timed[TokenBatch]] = asyncio.Queue()

    async def on_batch(batch: Timed[TokenBatch]) -> None:
        batches.put_nowait(batch)

    async def following() -> Timed[TokenBatch]:
        async with asyncio.timeout(5):
            return await batches.get()

    await bus.subscribe(tokens_subject(gateway), Timed[TokenBatch], on_batch, binary=True)
    return batches, following


async def test_a_batch_holds_what_every_request_of_a_gateway_got(
    make_context: Any, connect_bus: Any, make_steps: Callable[..., Steps]
) -> None:
    context = make_context("worker", ServiceSettings())
    steps = make_steps(context.bus, context.background)
    gateways = await connect_bus("gateway")
    ones, next_of_one = await received(gateways, ONE)
    _, next_of_other = await received(gateways, OTHER)
    await gateways.client.flush()
    for request, gateway, earlier in (
        ("req-1", ONE, 0),
        ("req-2", ONE, 7),
        ("req-3", OTHER, 0),
        ("req-4", ONE, 0),
        ("req-5", ONE, 0),
    ):
        steps.table.accept(submit(request, gateway, earlier))

    sampled, later = (Moment(at_s=at_s, wall_offset_s=5.0) for at_s in (1.0, 2.0))
    steps.give("req-1", 0, 5, sampled=sampled)
    steps.give("req-2", 7, 1, sampled=later)
    steps.give("req-4", 0, 8, sampled=later)
    steps.give("req-3", 0, 9)
    steps.give("req-1", 1, 6, finish=FinishReason.STOP)
    steps.publisher.flush()
    assert (await next_of_other()).message.entries == [entry_of("req-3", 0, 9)]
    told = await next_of_one()
    assert told.message.worker_id == "w"
    assert told.sent == sampled, "that of its first token"
    assert told.message.entries == [
        entry_of("req-1", 0, 5, 6, finish=FinishReason.STOP),
        entry_of("req-2", 7, 1),
        entry_of("req-4", 0, 8),
    ]
    assert ones.empty()

    # Of what has left nothing is kept here.
    steps.give("req-5", 0, 3)
    steps.publisher.flush()
    told = await next_of_one()
    assert told.message.entries == [entry_of("req-5", 0, 3)]
    assert told.sent is None


async def test_what_collects_while_a_message_is_on_its_way_leaves_with_the_next(
    make_context: Any, make_steps: Callable[..., Steps]
) -> None:
    context = make_context("worker", ServiceSettings())
    bus = GatedBus()
    steps = make_steps(bus, context.background)
    for request in ("req-1", "req-2", "req-3", "req-4"):
        steps.table.accept(submit(request))
    steps.give("req-1", 0, 5)
    steps.publisher.flush()
    async with asyncio.timeout(5):
        await bus.sending.wait()
    bus.sending.clear()
    for position in range(1, 4):
        steps.give("req-1", position, 10 + position)
        steps.give("req-2", position - 1, 20 + position)
        steps.give("req-3", position - 1, 30 + position)
        steps.give("req-4", position - 1, 40 + position)
        steps.publisher.flush()
    # One client leaves, and another gateway has its tokens by a resend already.
    steps.table.cancel(ONE, [RequestId("req-3")])
    steps.table.acknowledge(ONE, AckEntry(request_id=RequestId("req-4"), attempt=1, seq=3), 0.0)
    steps.table.acknowledge(ONE, AckEntry(request_id=RequestId("req-2"), attempt=1, seq=1), 0.0)
    assert len(bus.batches) == 1
    bus.gate.set()
    async with asyncio.timeout(5):
        await bus.sending.wait()
    first, second = bus.batches
    assert first.entries == [entry_of("req-1", 0, 5)]
    assert second.entries == [
        entry_of("req-1", 1, 11, 12, 13),
        entry_of("req-2", 1, 22, 23),
    ]


async def test_what_the_bus_does_not_take_at_once_is_sent_by_a_task(
    make_context: Any, make_steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MAX_BATCH_TOKENS", 2)
    context = make_context("worker", ServiceSettings())
    bus = GatedBus()
    bus.at_once = 1
    steps = make_steps(bus, context.background)
    for request in ("req-1", "req-2", "req-3"):
        steps.table.accept(submit(request))
    for number, request in enumerate(("req-1", "req-2", "req-3")):
        steps.give(request, 0, number, number + 1)
    steps.publisher.flush()
    async with asyncio.timeout(5):
        await bus.sending.wait()
    assert [[entry.request_id for entry in batch.entries] for batch in bus.batches] == [
        ["req-1"],
        ["req-2"],
    ]
    bus.gate.set()
    bus.at_once = 1
    steps.give("req-1", 2, 7)
    steps.publisher.flush()
    await until(lambda: len(bus.batches) == 4)
    assert [batch.entries[0].request_id for batch in bus.batches[2:]] == ["req-3", "req-1"]


async def test_too_many_tokens_for_one_message_leave_in_several(
    make_context: Any, make_steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "MAX_BATCH_TOKENS", 4)
    context = make_context("worker", ServiceSettings())
    bus = GatedBus()
    bus.gate.set()
    steps = make_steps(bus, context.background)
    for request in ("req-1", "req-2", "req-3", "req-4"):
        steps.table.accept(submit(request))
    steps.give("req-1", 0, *range(1, 7))
    steps.give("req-2", 0, 1, 2)
    steps.give("req-3", 0, 1, 2)
    steps.give("req-4", 0, 1)
    await steps.publisher.drain()
    sent = [[entry.request_id for entry in batch.entries] for batch in bus.batches]
    assert sent == [["req-1"], ["req-2", "req-3"], ["req-4"]]
    assert bus.batches[0].entries == [entry_of("req-1", 0, *range(1, 7))]


async def test_what_nobody_looks_at_yet_waits_for_its_end(
    make_context: Any, make_steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "SHORTEST_S", 0.0)
    context = make_context("worker", ServiceSettings())
    bus = GatedBus()
    bus.at_once = 100
    steps = make_steps(bus, context.background)
    steps.table.accept(submit("req-1", whole=True))
    steps.table.accept(submit("req-2"))
    for position in range(3):
        steps.give("req-1", position, 10 + position)
        steps.give("req-2", position, 20 + position)
        steps.publisher.flush()
    steps.give("req-1", 3, 13, finish=FinishReason.STOP)
    steps.publisher.flush(ended=True)
    assert [batch.entries for batch in bus.batches] == [
        [entry_of("req-1", 0, 10), entry_of("req-2", 0, 20)],
        [entry_of("req-2", 1, 21)],
        [entry_of("req-2", 2, 22)],
        [entry_of("req-1", 1, 11, 12, 13, finish=FinishReason.STOP)],
    ]


async def test_nothing_waits_for_longer_than_it_may(
    make_context: Any, make_steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "WHOLE_S", 0.01)
    context = make_context("worker", ServiceSettings())
    bus = GatedBus()
    bus.at_once = 100
    steps = make_steps(bus, context.background)
    steps.table.accept(submit("req-1", whole=True))
    steps.give("req-1", 0, 10)
    # Not sent yet: what comes goes along.
    steps.give("req-1", 1, 11)
    steps.publisher.flush()
    steps.give("req-1", 2, 12)
    steps.give("req-1", 3, 13)
    await until(lambda: len(bus.batches) == 2)
    assert [batch.entries for batch in bus.batches] == [
        [entry_of("req-1", 0, 10, 11)],
        [entry_of("req-1", 2, 12, 13)],
    ]
    # As when the worker ends.
    steps.give("req-1", 4, 14)
    bus.gate.set()
    await steps.publisher.drain()
    assert bus.batches[-1].entries == [entry_of("req-1", 4, 14)]
