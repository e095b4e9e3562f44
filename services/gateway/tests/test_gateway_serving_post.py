"""What a gateway tells workers leaves together, and what is urgent at once."""

import asyncio
from typing import Any, cast

import pytest

from pilotlight.common.bus import Bus
from pilotlight.common.messages.tokens import Ack, AckEntry, Cancel
from pilotlight.common.waiting import Wake
from pilotlight.gateway.serving import post as posting
from pilotlight.gateway.serving.post import Post
from pilotlight.policy.ids import GatewayId, RequestId, WorkerId

pytestmark = pytest.mark.anyio

ONE, OTHER = WorkerId("w-1"), WorkerId("w-2")


class SaidBus:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    async def publish(self, subject: str, message: object) -> None:
        self.said.append((subject, message))


def done(number: int) -> AckEntry:
    return AckEntry(request_id=RequestId(f"req-{number}"), attempt=1, seq=3, done=True)


def made() -> tuple[Post, SaidBus, Wake]:
    bus, wake = SaidBus(), Wake()
    return Post(cast(Bus, bus), GatewayId("gw-1"), wake), bus, wake


async def test_ends_of_requests_gather_and_none_is_left() -> None:
    post, bus, wake = made()
    for number in range(5):
        post.acknowledge(ONE if number % 2 else OTHER, done(number))
        post.soon()
    assert await wake.wait(5.0)
    await post.send()
    acks = {subject: [entry.request_id for entry in ack.entries] for subject, ack in bus.said}
    assert acks == {
        "v1.worker.w-1.ack": ["req-1", "req-3"],
        "v1.worker.w-2.ack": ["req-0", "req-2", "req-4"],
    }
    # The next one has a time of its own.
    post.acknowledge(ONE, done(9))
    post.soon()
    assert await wake.wait(5.0)
    await post.send()
    assert len(bus.said) == 3


async def test_what_is_still_run_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "DONE_WITHIN_S", 3600.0)
    post, bus, wake = made()
    post.acknowledge(ONE, done(1))
    post.soon()
    post.cancel(ONE, RequestId("req-2"))
    post.now()
    assert await wake.wait(5.0)
    await post.send()
    kinds = [type(message) for _, message in bus.said]
    assert kinds == [Cancel, Ack]
    assert bus.said[0][1].request_ids == ["req-2"]


async def test_many_entries_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "MAX_ENTRIES", 4)
    post, bus, _ = made()
    post.acknowledge(ONE, *map(done, range(10)))
    await post.send()
    assert [len(message.entries) for _, message in bus.said] == [4, 4, 2]
    await asyncio.sleep(0)
    await post.send()
    assert len(bus.said) == 3
