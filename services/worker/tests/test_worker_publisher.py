"""Token batches on a real NATS server: one message for each step and gateway, joined while the last
one is recent.
"""

import asyncio
from typing import Any

import pytest

from pilotlight.common.envelope import Timed
from pilotlight.common.messages.tokens import TokenBatch, TokenEntry, tokens_subject
from pilotlight.common.settings import ServiceSettings
from pilotlight.policy.ids import GatewayId, RequestId, WorkerId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import FinishReason
from pilotlight.worker.publisher import MAX_PENDING_TOKENS, TokenPublisher
from pilotlight.worker.requests import Outgoing

pytestmark = pytest.mark.anyio

ONE, OTHER = GatewayId("gw-1"), GatewayId("gw-2")


def outgoing(
    seq: int, *token_ids: int, gateway: GatewayId = ONE, request: str = "req-1", **other: Any
) -> Outgoing:
    entry = TokenEntry(
        request_id=RequestId(request), attempt=1, seq=seq, token_ids=list(token_ids), **other
    )
    return Outgoing(gateway, entry)


async def received(bus: Any, gateway: GatewayId, batches: asyncio.Queue[Timed[TokenBatch]]) -> None:
    async def on_batch(batch: Timed[TokenBatch]) -> None:
        batches.put_nowait(batch)

    await bus.subscribe(tokens_subject(gateway), Timed[TokenBatch], on_batch, binary=True)


async def test_a_batch_holds_what_every_request_of_a_gateway_got(
    make_context: Any, connect_bus: Any
) -> None:
    context = make_context("worker", ServiceSettings())
    publisher = TokenPublisher(context.bus, context.background, WorkerId("w"))
    gateways = await connect_bus("gateway")
    ones: asyncio.Queue[Timed[TokenBatch]] = asyncio.Queue()
    others: asyncio.Queue[Timed[TokenBatch]] = asyncio.Queue()
    await received(gateways, ONE, ones)
    await received(gateways, OTHER, others)
    await gateways.client.flush()

    sampled, later = (Moment(at_s=at_s, wall_offset_s=5.0) for at_s in (1.0, 2.0))
    publisher.add(outgoing(0, 5, logprobs=[-0.5], top_logprobs=[[(5, -0.5)]]), sampled)
    publisher.add(outgoing(7, 1, request="req-2"), later)
    publisher.add(outgoing(0, 8, request="req-4"), later)
    publisher.add(outgoing(0, 9, gateway=OTHER, request="req-3"))
    publisher.add(
        outgoing(1, 6, logprobs=[-0.6], top_logprobs=[[(6, -0.6)]], finish=FinishReason.STOP)
    )
    publisher.flush()
    async with asyncio.timeout(5):
        told = await ones.get()
        assert (await others.get()).message.entries == [outgoing(0, 9, request="req-3").entry]
    batch = told.message
    assert batch.worker_id == "w"
    assert told.sent == sampled, "that of its first token"
    assert batch.entries == [
        outgoing(
            0,
            5,
            6,
            logprobs=[-0.5, -0.6],
            top_logprobs=[[(5, -0.5)], [(6, -0.6)]],
            finish=FinishReason.STOP,
        ).entry,
        outgoing(7, 1, request="req-2").entry,
        outgoing(0, 8, request="req-4").entry,
    ]
    assert ones.empty()

    # What does not fit is dropped: its gateway sees the gap and asks for it.
    publisher.add(outgoing(0, 3, request="req-5"), later)
    publisher.add(outgoing(2, *([1] * (MAX_PENDING_TOKENS - 1))), later)
    publisher.add(outgoing(1 + MAX_PENDING_TOKENS, 1))
    publisher.add(outgoing(3 + MAX_PENDING_TOKENS, 2))
    publisher.flush()
    async with asyncio.timeout(5):
        last = await ones.get()
    assert last.message.entries == [outgoing(3 + MAX_PENDING_TOKENS, 2).entry]
    assert last.sent is None, "of tokens that have left, or were dropped, nothing is kept"
