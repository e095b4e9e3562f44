"""Leaders that follow one another, and what a leader does without its lease, its database or its
bus.
"""

from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import URL, create_engine, func, select, text, update
from sqlalchemy.pool import NullPool

from pilotlight.common.buckets import LEADER, Bucket
from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.errors import StaleCommand
from pilotlight.common.messages.hold import LEADING_KEY, Leading, WorkerHold
from pilotlight.common.service import Application
from pilotlight.common.testing import ReconnectingBus, until
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import model as a_model
from pilotlight.scheduler.testing import TRACE, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
H = HeldState


async def test_a_standby_takes_over_and_drops_nothing(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    ready = await rig.ready()
    await new_scheduler(rig.clock)
    epoch = rig.epoch
    holds: list[WorkerHold] = []

    async def heard(command: WorkerHold) -> None:
        holds.append(command)

    listening = await rig.bus.subscribe("v1.worker.w0.hold", WorkerHold, heard)
    for component in reversed(rig.application.components):
        await component.stop()
    await rig.until(lambda: rig.shown[ready.instance_id] is not None)
    for _ in range(4):
        await rig.later(0.5)
    await rig.until(lambda: rig.epoch > epoch)
    await listening.end()
    assert all(
        [one.instance_id for one in command.holds] == [ready.instance_id] for command in holds
    )
    traces = {one.trace_parent.split("-")[1] for command in holds for one in command.holds}
    assert traces == {TRACE.split("-")[1]}, "its cold start is not done: it stays one trace"
    assert [one.instance_id for one in rig.instances(S.READY)] == [ready.instance_id]
    (row,) = await rig.rows(select(tables.instances.c.state))
    assert row.state == "ready"


async def test_a_leader_whose_lease_was_taken_writes_and_commands_no_more(rig: Rig) -> None:
    await rig.register(a_model(min_instances=1))
    ready = await rig.ready()
    in_half_a_second = func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, 0.5)
    async with rig.owner.unit_of_work() as work:
        stolen = update(tables.lease).values(
            holder="another", epoch=tables.lease.c.epoch + 1, expires_at=in_half_a_second
        )
        await work.connection.execute(stolen)
    rig.held.clear()
    rig.incarnation = "b"
    await rig.passing(rig.report, lambda: rig.instances(S.FAILED))
    (failed,) = rig.instances(S.FAILED)
    assert failed.instance_id == ready.instance_id
    assert failed.epoch >= ready.epoch + 2, "nothing was written until the lease was its own again"


async def test_without_a_database_nothing_is_started_and_nothing_is_lost(
    rig: Rig, module_database: URL
) -> None:
    ready = await rig.ready()
    await rig.register(a_model(keep_alive_s=0.5), a_model("other"))
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    server = create_engine(
        module_database.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )

    def allow(connections: bool) -> None:
        with server.connect() as connection:
            connection.execute(
                text(f"ALTER DATABASE {module_database.database} ALLOW_CONNECTIONS {connections}")
            )
            gone = text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
            )
            connection.execute(gone, {"name": module_database.database})

    allow(False)
    try:
        await rig.passing(lambda: rig.waited("other"), lambda: rig.application.ready() is not None)
        assert [one.instance_id for one in rig.instances(*S)] == [ready.instance_id]
        assert rig.instances(S.READY)
    finally:
        allow(True)
        server.dispose()
    await rig.passing(lambda: rig.waited("other"), lambda: rig.instances(S.FETCHING))
    assert [one.model for one in rig.instances(S.FETCHING)] == ["other"]
    assert [one.instance_id for one in rig.instances(S.READY)] == [ready.instance_id]


async def test_the_epoch_is_known_to_who_was_away_before_anything_is_commanded(
    rig: Rig, reconnecting: ReconnectingBus
) -> None:
    bucket = await rig.bus.bucket(LEADER)
    assert rig.epoch > 0
    assert (await bucket.get(LEADING_KEY, Leading)).value == Leading(epoch=rig.epoch)
    await bucket.delete(LEADING_KEY)
    await reconnecting.reconnect()
    await until_says(bucket, rig.epoch)
    # Whatever the lease's row says, for example one from a backup: no worker would obey an epoch
    # below this one.
    await bucket.put(LEADING_KEY, Leading(epoch=Epoch(50)))
    await reconnecting.reconnect()
    await rig.passing(lambda: rig.later(0.3), lambda: rig.epoch > 50)
    assert rig.epoch == 51
    await until_says(bucket, rig.epoch)


async def until_says(bucket: Bucket, epoch: Epoch) -> None:
    async def said() -> bool:
        return (await bucket.get(LEADING_KEY, Leading)).value == Leading(epoch=epoch)

    await until(said)


async def test_a_leader_that_the_cache_knows_to_be_replaced_leads_no_more(rig: Rig) -> None:
    rig.refusal = StaleCommand("epoch 1 is older than 2")
    before = rig.epoch
    await rig.demand()
    await rig.until(lambda: rig.reserved)
    assert rig.reserved[0].epoch == before
    rig.refusal = None
    rig.clock.advance(0.5)
    await rig.demand()
    await rig.until(lambda: len(rig.reserved) > 1)
    assert rig.reserved[-1].epoch > before, (
        "it leads again under an epoch of its own, or not at all"
    )
