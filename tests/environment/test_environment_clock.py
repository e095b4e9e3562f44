"""The time of day jumps by an hour: it is told, the lease is not lost for long, and it never has
two holders.

To the database a jump of its clock is the same as a shift of every time that it has stored, the
other way.
"""

import json
from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest
from sqlalchemy import update

from pilotlight.common.clock import ManualClock, SystemClock
from pilotlight.common.clock_watch import JUMP_S, ClockWatch
from pilotlight.common.db import tables
from pilotlight.common.db.session import Database
from pilotlight.common.errors import NotLeader
from pilotlight.common.telemetry import configure_logging
from pilotlight.common.testing import DatabaseSettingsOf
from pilotlight.policy.ids import Epoch
from pilotlight.scheduler.lease import LEASE_S, Fence, Lease

pytestmark = pytest.mark.anyio

HOUR = timedelta(hours=1)


class JumpingClock(ManualClock):
    def jump(self, by: timedelta) -> None:
        self._wall += by


def test_a_jump_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("probe")
    clock = JumpingClock()
    watch = ClockWatch(clock)
    for _ in range(3):
        clock.advance(1.0)
        clock.jump(timedelta(seconds=JUMP_S / 10))
        assert watch.look() == 0.0, "a time service corrects a little at a time"
    for by in (HOUR, -HOUR):
        clock.jump(by)
        assert watch.look() == pytest.approx(by.total_seconds())
        assert watch.look() == 0.0
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["action"], line["jumped_s"]) for line in told] == [
        ("clock_jumped", 3600.0),
        ("clock_jumped", -3600.0),
    ]
    assert all("time service" in line["what_to_do"] for line in told)


@pytest.fixture
async def database(database_settings: DatabaseSettingsOf) -> AsyncGenerator[Database]:
    database = Database(database_settings("scheduler"), "scheduler", SystemClock())
    await database.start()
    async with database.unit_of_work() as work:
        await work.connection.execute(tables.lease.delete())
    yield database
    await database.stop()


async def jump(database: Database, by: timedelta) -> None:
    """Let the database's clock jump."""
    async with database.unit_of_work() as work:
        await work.connection.execute(
            update(tables.lease).values(expires_at=tables.lease.c.expires_at - by)
        )


async def writes(database: Database, holder: str, epoch: int) -> bool:
    try:
        async with Fence(database, holder, Epoch(epoch)).unit_of_work():
            return True
    except NotLeader:
        return False


async def test_forward_the_leader_takes_the_lease_again_at_once(database: Database) -> None:
    leader, standby = Lease(database, "leader"), Lease(database, "standby")
    assert await leader.take(Epoch(1)) == 1
    await jump(database, HOUR)
    assert not await writes(database, "leader", 1), (
        "by the only clock that counts its lease is over"
    )
    assert await leader.take(Epoch(1)) == 2
    assert await standby.take(Epoch(1)) is None
    assert [await writes(database, "leader", epoch) for epoch in (1, 2)] == [False, True]


async def test_forward_a_standby_may_take_it_and_the_old_leader_is_refused(
    database: Database,
) -> None:
    leader, standby = Lease(database, "leader"), Lease(database, "standby")
    await leader.take(Epoch(1))
    await jump(database, HOUR)
    assert await standby.take(Epoch(1)) == 2
    assert not await leader.renew(Epoch(1))
    assert await leader.take(Epoch(1)) is None
    assert (await writes(database, "leader", 1), await writes(database, "standby", 2)) == (
        False,
        True,
    )


async def test_back_the_leader_goes_on(database: Database) -> None:
    clock = ManualClock()
    leader, standby = Lease(database, "leader"), Lease(database, "standby", clock)
    await leader.take(Epoch(1))
    await jump(database, -HOUR)
    assert await standby.take(Epoch(1)) is None
    assert await leader.renew(Epoch(1))
    clock.advance(2 * LEASE_S)
    assert await standby.take(Epoch(1)) is None, "it is renewed"
    assert 0 < standby.left_s <= LEASE_S
    assert await writes(database, "leader", 1)


async def test_back_a_dead_leaders_lease_ends_within_a_term_not_in_an_hour(
    database: Database,
) -> None:
    clock = ManualClock()
    dead, standby = Lease(database, "dead"), Lease(database, "standby", clock)
    await dead.take(Epoch(1))
    await jump(database, -HOUR)
    assert await standby.take(Epoch(1)) is None
    assert 0 < standby.left_s <= LEASE_S
    clock.advance(LEASE_S - 0.1)
    assert await standby.take(Epoch(1)) is None
    clock.advance(0.2)
    assert await standby.take(Epoch(1)) == 2
    assert (await writes(database, "dead", 1), await writes(database, "standby", 2)) == (
        False,
        True,
    )
    # By then it is an ordinary lease.
    assert await Lease(database, "third", clock).take(Epoch(1)) is None


async def test_back_one_that_renews_in_the_last_moment_keeps_it(database: Database) -> None:
    clock = ManualClock()
    leader, standby = Lease(database, "leader"), Lease(database, "standby", clock)
    await leader.take(Epoch(1))
    await jump(database, -HOUR)
    await standby.take(Epoch(1))
    clock.advance(LEASE_S + 1)
    await leader.renew(Epoch(1))
    assert await standby.take(Epoch(1)) is None
    assert await leader.renew(Epoch(1))
