"""Grants of one moment are one transaction; what cannot be written is alone in that."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.cache.grant_rows import GrantRows
from pilotlight.cache.grants import Grant, Grants
from pilotlight.cache.repository import Added
from pilotlight.cache.sole import NotSole
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.common.service import Background
from pilotlight.common.testing import until
from pilotlight.policy.ids import Digest, GrantId, InstanceId, ModelName, NodeId, WorkerId

pytestmark = pytest.mark.anyio


def grant(name: str, instance: str = "", worker: str = "w", node: str = "n") -> Grant:
    return Grant(
        grant_id=GrantId(name),
        instance_id=InstanceId(instance or f"i-{name}"),
        digest=Digest("d"),
        worker_id=WorkerId(worker),
        node_id=NodeId(node),
        device_bytes=1,
        host_bytes=1,
        expires_s=0.0,
    )


def added(name: str, instance: str = "") -> Added:
    return Added(grant=grant(name, instance), model=ModelName("m"), lease_s=30.0)


class Rows:
    """A database that notes its transactions."""

    def __init__(self) -> None:
        self.transactions: list[tuple[list[str], list[str]]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.refused = ""
        self.is_away = False

    async def write_grants(self, added: Sequence[Added], ended: Sequence[GrantId]) -> None:
        names = [str(one.grant.grant_id) for one in added]
        self.transactions.append((names, [str(one) for one in ended]))
        await self.goes_on.wait()
        if self.is_away:
            raise DatabaseUnavailable("it is away")
        if self.refused in names:
            raise NotSole


class Rig:
    def __init__(self) -> None:
        self.rows = Rows()
        self.writer = GrantRows(self.rows, Background())

    async def together(self, *writes: Any) -> list[BaseException | None]:
        """Write some while another transaction is under way; what came of each."""
        self.rows.goes_on.clear()
        first = asyncio.create_task(self.writer.add(added("first")))
        await until(lambda: bool(self.rows.transactions))
        others = [asyncio.ensure_future(one) for one in writes]
        await asyncio.wait(others, timeout=0.01)
        self.rows.goes_on.set()
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(first, return_exceptions=True)
        return outcomes


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_what_comes_meanwhile_is_written_together(rig: Rig) -> None:
    writer = rig.writer
    outcomes = await rig.together(
        writer.add(added("a")), writer.end([GrantId("x")], may_wait=True), writer.add(added("b"))
    )
    assert outcomes == [None] * 3
    assert rig.rows.transactions == [(["first"], []), (["a", "b"], ["x"])]


async def test_what_was_given_back_alone_is_written_in_the_end(rig: Rig) -> None:
    assert await rig.together(rig.writer.end([GrantId("x")], may_wait=True)) == [None]
    await rig.writer.end([])
    assert rig.rows.transactions == [(["first"], []), ([], ["x"])]


async def test_two_grants_of_one_stage_follow_each_other(rig: Rig) -> None:
    await rig.together(rig.writer.add(added("a", "i")), rig.writer.add(added("b", "i")))
    assert [names for names, _ in rig.rows.transactions] == [["first"], ["a"], ["b"]]


async def test_one_that_is_refused_is_alone_in_that(rig: Rig) -> None:
    rig.rows.refused = "a"
    outcomes = await rig.together(rig.writer.add(added("a")), rig.writer.add(added("b")))
    assert [type(one) for one in outcomes] == [NotSole, type(None)]


async def test_a_database_that_is_away_is_asked_once_for_all(rig: Rig) -> None:
    rig.rows.is_away = True
    outcomes = await rig.together(rig.writer.add(added("a")), rig.writer.add(added("b")))
    assert [type(one) for one in outcomes] == [DatabaseUnavailable] * 2
    assert len(rig.rows.transactions) == 2
    rig.rows.is_away = False
    await rig.writer.add(added("c"))


async def test_a_caller_that_gives_up_breaks_nothing_off(rig: Rig) -> None:
    rig.rows.goes_on.clear()
    first = asyncio.create_task(rig.writer.add(added("first")))
    await until(lambda: bool(rig.rows.transactions))
    second = asyncio.create_task(rig.writer.add(added("a")))
    await asyncio.wait({second}, timeout=0.01)
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second})
    rig.rows.goes_on.set()
    await rig.writer.add(added("b"))
    assert sorted(one for names, _ in rig.rows.transactions for one in names) == ["a", "b", "first"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xy"), st.booleans())))
def test_grants_are_found_by_who_has_them(changes: list[tuple[str, str, bool]]) -> None:
    grants, known = Grants(), dict[str, Grant]()
    for name, owner, comes in changes:
        if comes:
            grants[GrantId(name)] = known[name] = grant(name, worker=owner, node=f"n-{owner}")
        else:
            assert grants.pop(GrantId(name), None) == known.pop(name, None)
    assert dict(grants) == known
    assert len(grants) == len(known)
    for owner in "xy":
        there = [one for one in known.values() if one.worker_id == owner]
        assert sorted(one.grant_id for one in grants.of_worker(WorkerId(owner))) == sorted(
            one.grant_id for one in there
        )
        assert list(grants.of_node(NodeId(f"n-{owner}"))) == list(grants.of_worker(WorkerId(owner)))
