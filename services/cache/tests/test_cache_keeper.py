"""The keeper has loaders fetch what no memory holds any more, and gives way to starts."""

from dataclasses import replace
from typing import Any

import pytest

from pilotlight.cache.books import Books
from pilotlight.cache.keeper import (
    INTERVAL_S,
    LEARN_S,
    MOVE_WITHIN_S,
    REFUSED_S,
    REPEAT_S,
    START_WITHIN_S,
    Keeper,
)
from pilotlight.cache.settings import HostCopies
from pilotlight.cache.testing import hear
from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.hold import NodePrefetch, prefetch_subject
from pilotlight.policy.cluster import Copy, FetchPriority, NodeFacts, Tier, Transfer
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.ids import NodeId
from pilotlight.policy.liveness import DEAD_AFTER_S
from pilotlight.policy.model import Model
from pilotlight.policy.testing import copy, model, node

pytestmark = pytest.mark.anyio
M = model()
N0, N1 = NodeId("n0"), NodeId("n1")


def whole(of: Model = M) -> Copy:
    parts = tuple(range(len(of.spec.part_bytes)))
    return replace(copy(of.name, size_bytes=of.spec.total_bytes), parts=parts)


def on(node_id: NodeId, *copies: Copy, pool_bytes: int = 1000) -> NodeFacts:
    there = tuple(replace(one, node_id=node_id) for one in copies)
    named = replace(node(copies=there, pool_bytes=pool_bytes), node_id=node_id)
    return replace(named, dataplane_host="h", dataplane_port=7)


class Rig:
    """A keeper, and loaders that hear what they are told."""

    def __init__(self, mode: HostCopies = HostCopies.KEPT, *models: Model) -> None:
        self.clock = ManualClock()
        self.books = Books(models=registered(models or (M,)))
        self.books.listen(self.clock.monotonic_s())
        self.told: list[tuple[str, NodePrefetch]] = []
        self.keeper = Keeper(self.books, self, self.clock, "c1", mode)  # type: ignore[arg-type]

    async def publish(self, subject: str, message: Any, **_: Any) -> None:
        self.told.append((subject, message))

    def report(self, *nodes: NodeFacts) -> None:
        for one in nodes:
            hear(self.books, one, self.clock.monotonic_s())

    def lose(self, *alive: NodeFacts) -> None:
        """Nodes that do not report any more are dead."""
        for _ in range(8):
            self.clock.advance(DEAD_AFTER_S / 4)
            self.report(*alive)
            now_s = self.clock.monotonic_s()
            self.books.follow(self.books.roster.check(now_s), now_s)

    async def follow(self, seconds: float = INTERVAL_S) -> list[tuple[str, list[str]]]:
        """What is told after some time: to whom, and models."""
        self.clock.advance(seconds)
        before = len(self.told)
        await self.keeper.follow()
        return [
            (subject, [one.model.name for one in message.fetches])
            for subject, message in self.told[before:]
        ]


async def test_a_copy_that_is_lost_with_its_node_is_fetched_again() -> None:
    rig = Rig()
    rig.report(on(N0, whole()), on(N1))
    assert await rig.follow(LEARN_S) == []
    rig.lose(on(N1))
    assert await rig.follow() == [(prefetch_subject(N1), ["m"])]
    _, message = rig.told[-1]
    fetch = message.fetches[0]
    assert (fetch.priority, fetch.instance_id, fetch.generation) == (FetchPriority.PREFETCH, "", 1)
    assert fetch.parts == tuple(range(6))
    rig.report(on(N1, whole()))
    assert await rig.follow() == [(prefetch_subject(N1), [])], "the order is over"
    assert await rig.follow() == []


async def test_nothing_is_missing_before_every_node_was_heard() -> None:
    rig = Rig(HostCopies.ALL)
    rig.report(on(N0))
    assert await rig.follow(LEARN_S / 2) == []
    assert await rig.follow(LEARN_S) == [(prefetch_subject(N0), ["m"])]


async def test_what_never_was_in_memory_is_fetched_only_where_all_models_are_kept() -> None:
    rig = Rig(HostCopies.KEPT)
    rig.report(on(N0))
    assert await rig.follow(LEARN_S) == []
    rig.keeper.had(M.digest, Tier.DISK)
    assert await rig.follow() == []
    rig.keeper.had(M.digest, Tier.HOST)
    assert await rig.follow() == [(prefetch_subject(N0), ["m"])], "an earlier cache knew of it"


@pytest.mark.parametrize(
    ("mode", "kept"), [(HostCopies.OFF, M), (HostCopies.ALL, replace(M, keep_host_copy=False))]
)
async def test_no_copy_is_kept_of_what_is_not_to_be_kept(mode: HostCopies, kept: Model) -> None:
    rig = Rig(mode, kept)
    rig.report(on(N0))
    assert await rig.follow(LEARN_S) == []


async def test_an_order_is_repeated_and_given_up_where_nothing_comes_of_it() -> None:
    rig = Rig(HostCopies.ALL)
    rig.report(on(N0))
    assert await rig.follow(LEARN_S) == [(prefetch_subject(N0), ["m"])]
    assert await rig.follow(REPEAT_S / 2) == []
    assert await rig.follow(REPEAT_S) == [(prefetch_subject(N0), ["m"])]
    assert await rig.follow(START_WITHIN_S) == [(prefetch_subject(N0), [])]
    assert rig.keeper.plan.left == (M.digest,)
    assert await rig.follow(REFUSED_S + 1) == [(prefetch_subject(N0), ["m"])]
    assert rig.told[-1][1].fetches[0].generation == 2, "another try"
    assert [message.seq for _, message in rig.told] == [1, 2, 3, 4]


async def test_a_fetch_that_goes_on_is_not_given_up() -> None:
    rig = Rig(HostCopies.ALL)
    rig.report(on(N0))
    await rig.follow(LEARN_S)
    coming = Transfer(
        digest=M.digest, source="s", done_bytes=1, total_bytes=60, priority=FetchPriority.PREFETCH
    )
    rig.report(replace(on(N0), transfers=(coming,)))
    for _ in range(5):
        told = await rig.follow(START_WITHIN_S)
        assert told == [(prefetch_subject(N0), ["m"])]


async def test_a_start_that_finds_no_room_gets_that_of_what_is_fetched_ahead() -> None:
    rig = Rig(HostCopies.ALL)
    rig.report(on(N0))
    await rig.follow(LEARN_S)
    assert await rig.keeper.yield_room(N0)
    assert rig.told[-1][1].fetches == ()
    assert not await rig.keeper.yield_room(N0)
    assert await rig.follow() == [], "and it is not taken again at once"


async def test_a_node_that_drains_keeps_a_copy_until_another_node_has_it() -> None:
    rig = Rig()
    rig.report(on(N0, whole()), on(N1))
    await rig.follow(LEARN_S)
    rig.books.draining = frozenset({N0})
    assert await rig.follow(0.1) == [(prefetch_subject(N1), ["m"])]
    assert [one.node_id for one in rig.told[-1][1].fetches[0].upstreams] == [N0]
    assert rig.books.strikable(N0, rig.keeper.keeps(N0)) == ()
    rig.report(on(N1, whole()))
    await rig.follow()
    assert rig.books.strikable(N0, rig.keeper.keeps(N0)) == (M.digest,)


async def test_a_drain_does_not_wait_for_ever_nor_for_what_has_no_room() -> None:
    rig = Rig()
    rig.report(on(N0, whole()), on(N1))
    await rig.follow(LEARN_S)
    rig.books.draining = frozenset({N0})
    await rig.follow(0.1)
    rig.clock.advance(MOVE_WITHIN_S + 1)
    assert rig.books.strikable(N0, rig.keeper.keeps(N0)) == (M.digest,)
    full = Rig()
    full.report(on(N0, whole()), on(N1, pool_bytes=50))
    await full.follow(LEARN_S)
    full.books.draining = frozenset({N0})
    assert await full.follow(0.1) == []
    assert full.books.strikable(N0, full.keeper.keeps(N0)) == (M.digest,)
