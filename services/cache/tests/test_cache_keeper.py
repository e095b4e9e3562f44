"""The keeper has loaders fetch what no memory holds any more, and gives way to starts."""

from dataclasses import replace

import pytest

from pilotlight.cache.keeper import (
    INTERVAL_S,
    LEARN_S,
    MOVE_WITHIN_S,
    REFUSED_S,
    REPEAT_S,
    START_WITHIN_S,
)
from pilotlight.cache.settings import HostCopies
from pilotlight.cache.testing import KeeperRig, on, whole
from pilotlight.common.messages.hold import prefetch_subject
from pilotlight.policy.cluster import FetchPriority, Tier, Transfer
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Model
from pilotlight.policy.testing import model

pytestmark = pytest.mark.anyio
M = model()
N0, N1 = NodeId("n0"), NodeId("n1")


async def test_a_copy_that_is_lost_with_its_node_is_fetched_again() -> None:
    rig = KeeperRig((M,))
    rig.report(on(N0, whole(M)), on(N1))
    assert await rig.follow(LEARN_S) == []
    rig.lose(on(N1))
    assert await rig.follow() == [(prefetch_subject(N1), ["m"])]
    _, message = rig.told[-1]
    fetch = message.fetches[0]
    assert (fetch.priority, fetch.instance_id, fetch.generation) == (FetchPriority.PREFETCH, "", 1)
    assert fetch.parts == tuple(range(6))
    rig.report(on(N1, whole(M)))
    assert await rig.follow() == [(prefetch_subject(N1), [])], "the order is over"
    assert await rig.follow() == []


async def test_a_node_that_comes_is_told_at_once_what_was_lost() -> None:
    """And not with the next decision: its workers are not up yet."""
    rig = KeeperRig((M,))
    rig.report(on(N0, whole(M)))
    assert await rig.follow(LEARN_S) == []
    rig.lose()
    assert await rig.follow() == []
    rig.report(on(N1))
    assert await rig.follow(INTERVAL_S / 10) == [], "it was decided just now"
    rig.keeper.soon()
    assert await rig.follow(INTERVAL_S / 10) == [(prefetch_subject(N1), ["m"])]


async def test_nothing_is_missing_before_every_node_was_heard() -> None:
    rig = KeeperRig((M,), HostCopies.ALL)
    rig.report(on(N0))
    assert await rig.follow(LEARN_S / 2) == []
    assert await rig.follow(LEARN_S) == [(prefetch_subject(N0), ["m"])]


async def test_what_never_was_in_memory_is_fetched_only_where_all_models_are_kept() -> None:
    rig = KeeperRig((M,))
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
    rig = KeeperRig((kept,), mode)
    rig.report(on(N0))
    assert await rig.follow(LEARN_S) == []


async def test_an_order_is_repeated_and_given_up_where_nothing_comes_of_it() -> None:
    rig = KeeperRig((M,), HostCopies.ALL)
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
    rig = KeeperRig((M,), HostCopies.ALL)
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
    rig = KeeperRig((M,), HostCopies.ALL)
    rig.report(on(N0))
    await rig.follow(LEARN_S)
    assert await rig.keeper.yield_room(N0)
    assert rig.told[-1][1].fetches == ()
    assert not await rig.keeper.yield_room(N0)
    assert await rig.follow() == [], "and it is not taken again at once"


async def test_a_node_that_drains_keeps_a_copy_until_another_node_has_it() -> None:
    rig = KeeperRig((M,))
    rig.report(on(N0, whole(M)), on(N1))
    await rig.follow(LEARN_S)
    rig.books.draining = frozenset({N0})
    assert await rig.follow(0.1) == [(prefetch_subject(N1), ["m"])]
    assert [one.node_id for one in rig.told[-1][1].fetches[0].upstreams] == [N0]
    assert rig.books.strikable(N0, rig.keeper.keeps(N0)) == ()
    rig.report(on(N1, whole(M)))
    await rig.follow()
    assert rig.books.strikable(N0, rig.keeper.keeps(N0)) == (M.digest,)


async def test_a_drain_does_not_wait_for_ever_nor_for_what_has_no_room() -> None:
    rig = KeeperRig((M,))
    rig.report(on(N0, whole(M)), on(N1))
    await rig.follow(LEARN_S)
    rig.books.draining = frozenset({N0})
    await rig.follow(0.1)
    rig.clock.advance(MOVE_WITHIN_S + 1)
    assert rig.books.strikable(N0, rig.keeper.keeps(N0)) == (M.digest,)
    full = KeeperRig((M,))
    full.report(on(N0, whole(M)), on(N1, pool_bytes=50))
    await full.follow(LEARN_S)
    full.books.draining = frozenset({N0})
    assert await full.follow(0.1) == []
    assert full.books.strikable(N0, full.keeper.keeps(N0)) == (M.digest,)
