"""Copies go though no start asks for their room: those that are one too many, and those past their
time to live; never the last one of a model that is missed, nor what something needs.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.cache.grants import Grant, Grants
from pilotlight.cache.keeper import INTERVAL_S, LEARN_S
from pilotlight.cache.settings import HostCopies
from pilotlight.cache.striking import EXPIRED, SPARE, Striker
from pilotlight.cache.testing import KeeperRig, on, whole
from pilotlight.common.errors import DeadlineExceeded
from pilotlight.common.messages.hold import prefetch_subject
from pilotlight.common.messages.room import Drop, Dropped, drop_subject
from pilotlight.policy.arrivals import Access
from pilotlight.policy.cluster import Copy
from pilotlight.policy.eviction.base import EvictionRules
from pilotlight.policy.eviction.rivals.idle import KEEP_ALIVE_S
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import Digest, GrantId, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model
from pilotlight.policy.testing import model

pytestmark = pytest.mark.anyio
N0, N1 = NodeId("n0"), NodeId("n1")
A, B, C = (model(name, part_bytes=60) for name in "abc")
"""A pool has room for two of them, and a tenth."""
POOL_BYTES = 800


class Rig(KeeperRig):
    """Two loaders that free what they are asked to, and what is recorded of that."""

    def __init__(
        self, models: Iterable[Model], policy: str = "lru", mode: HostCopies = HostCopies.KEPT
    ) -> None:
        super().__init__(models, mode)
        self.books.policies = TierPolicies(policy)
        self.there: dict[NodeId, tuple[Copy, ...]] = {N0: (), N1: ()}
        self.struck: list[tuple[NodeId, str, dict[Digest, ModelName]]] = []
        self.silent = False
        self.locks = defaultdict[NodeId, asyncio.Lock](asyncio.Lock)
        self.striker = Striker(
            self.books,
            self,
            self,
            self.clock,
            EvictionRules(),
            self.keeper,
            self.locks,
        )

    async def request(self, subject: str, message: Drop, *_: Any, **__: Any) -> Dropped:
        if self.silent:
            raise DeadlineExceeded
        (where,) = (one for one in self.there if drop_subject(one) == subject)
        assert all(one.leases == 0 for one in self.there[where] if one.digest in message.digests)
        self.there[where] = tuple(
            one for one in self.there[where] if one.digest not in message.digests
        )
        return Dropped(digests=message.digests, fits=True)

    async def add_struck(
        self, node_id: NodeId, reason: str, copies: Mapping[Digest, ModelName]
    ) -> None:
        self.struck.append((node_id, reason, dict(copies)))

    def say(self) -> None:
        """Both report what they have."""
        for where, copies in self.there.items():
            used = sum(one.size_bytes for one in copies)
            facts = on(where, *copies, pool_bytes=POOL_BYTES)
            self.report(replace(facts, pool_free_bytes=POOL_BYTES - used))

    async def sweep(self, seconds: float = INTERVAL_S) -> list[tuple[str, list[str]]]:
        self.say()
        told = await self.follow(seconds)
        await self.striker.follow()
        return told


def full() -> Rig:
    """Copies of a and b on both nodes, and c was there."""
    rig = Rig((A, B, C))
    rig.there = {N0: (whole(A), whole(B)), N1: (whole(A), whole(B))}
    rig.keeper.had(C.digest, whole(C).tier)
    return rig


async def test_what_is_one_too_many_makes_way_for_what_has_no_copy() -> None:
    rig = full()
    await rig.sweep(LEARN_S)
    assert rig.struck == [(N0, SPARE, {A.digest: A.name})]
    assert await rig.sweep() == [(prefetch_subject(N0), ["c"])]
    rig.there[N0] += (whole(C),)
    for _ in range(5):
        await rig.sweep()
    assert len(rig.struck) == 1, "each has one: nothing more goes"


async def test_what_was_one_too_many_a_moment_ago_may_be_the_last_one() -> None:
    rig = full()
    rig.silent = True
    await rig.sweep(LEARN_S)
    rig.silent = False
    rig.there[N1] = (whole(B),)
    await rig.sweep(INTERVAL_S / 4)
    assert rig.struck == []


async def test_a_copy_that_was_freed_is_no_copy_before_its_loader_says_so() -> None:
    """A model of twice the size needs the room of two copies; one of a has just gone."""
    large = model("large", part_bytes=120)
    rig = Rig((A, B, large))
    rig.there = full().there
    rig.keeper.had(large.digest, whole(large).tier)
    rig.say()
    rig.books.drop(N1, (A.digest,))
    await rig.follow(LEARN_S)
    assert rig.keeper.plan.giving_way == ((N1, B.digest),)


@pytest.mark.parametrize("why", ["pinned", "read", "awaited"])
async def test_what_is_needed_stays(why: str) -> None:
    rig = full()
    if why == "pinned":
        rig = Rig((replace(A, pinned=True), B, C))
        rig.there = full().there
        rig.keeper.had(C.digest, whole(C).tier)
    elif why == "read":
        rig.there = {
            one: tuple(
                replace(copy, leases=1) if copy.digest == A.digest else copy for copy in copies
            )
            for one, copies in rig.there.items()
        }
    else:
        rig.books.grants = Grants(
            Grant(
                grant_id=GrantId(one),
                instance_id=InstanceId("i"),
                digest=A.digest,
                worker_id=WorkerId("w"),
                node_id=one,
                device_bytes=1,
                host_bytes=1,
                expires_s=1e9,
            )
            for one in (N0, N1)
        )
    await rig.sweep(LEARN_S)
    assert rig.struck == [(N0, SPARE, {B.digest: B.name})]


async def test_time_to_live_ends_and_nothing_is_fetched_again() -> None:
    rig = Rig((A, B), "ttl")
    rig.there = {N0: (whole(A), whole(B)), N1: ()}
    await rig.sweep(LEARN_S)
    rig.clock.advance(KEEP_ALIVE_S - INTERVAL_S)
    rig.books.policies.on_access(Access(model=A.name, count=1, at_s=rig.clock.monotonic_s()))
    await rig.sweep()
    assert rig.struck == [(N0, EXPIRED, {B.digest: B.name})]
    for _ in range(3):
        assert await rig.sweep() == []
    rig.there[N0] += (whole(B),)
    await rig.sweep()
    rig.there[N0] = (whole(A),)
    assert await rig.sweep() == [(prefetch_subject(N1), ["b"])], "what is lost is missed as ever"


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("iam", HostCopies.KEPT), ("lru", HostCopies.KEPT), ("ttl", HostCopies.ALL)],
)
async def test_nothing_else_goes_for_its_age(policy: str, mode: HostCopies) -> None:
    rig = Rig((A, B), policy, mode)
    rig.there = {N0: (whole(A), whole(B)), N1: ()}
    await rig.sweep(LEARN_S)
    await rig.sweep(10 * KEEP_ALIVE_S)
    assert rig.struck == []


async def test_what_becomes_the_last_one_while_others_are_asked_stays() -> None:
    rig = full()
    rig.say()
    await rig.follow(LEARN_S)
    async with rig.locks[N0]:
        striking = asyncio.create_task(rig.striker.follow())
        await asyncio.sleep(0)
        rig.books.drop(N1, (A.digest,))
    await striking
    assert rig.struck == []
    assert A.digest in {one.digest for one in rig.there[N0]}
