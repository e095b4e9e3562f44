"""The bucket ``instances``, kept as the rows say."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.clock import ManualClock
from pilotlight.common.testing import ReconnectingBus
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch, InstanceId, WorkerId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import instance
from pilotlight.scheduler.publisher import AT_ONCE, InstancePublisher
from pilotlight.scheduler.testing import Rig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
S = InstanceState
H = HeldState


async def test_an_emptied_bucket_is_filled_after_a_reconnect(
    rig: Rig, reconnecting: ReconnectingBus
) -> None:
    ready = await rig.ready()
    await (await rig.bus.bucket(INSTANCES)).delete(ready.instance_id)
    await rig.until(lambda: rig.shown[ready.instance_id] is None)
    await reconnecting.reconnect()
    assert (await rig.shown_as(S.READY)).instance_id == ready.instance_id


async def test_what_no_instance_explains_is_removed_from_the_bucket(rig: Rig) -> None:
    ready = await rig.ready()
    bucket = await rig.bus.bucket(INSTANCES)
    await bucket.put("inst-ghost", replace(ready, instance_id=InstanceId("inst-ghost")))
    await rig.until(lambda: ("inst-ghost", None) in rig.states)
    assert rig.shown[ready.instance_id] is not None
    assert WorkerId("w0") == ready.lead


async def test_what_an_old_leader_wrote_or_removed_late_is_shown_again(rig: Rig) -> None:
    ready = await rig.ready()
    bucket = await rig.bus.bucket(INSTANCES)
    late = replace(ready, epoch=Epoch(ready.epoch - 1), state=S.LOADING)
    await bucket.put(late.instance_id, late)
    await rig.until(
        lambda: rig.states[-2:] == [(ready.instance_id, S.LOADING), (ready.instance_id, S.READY)]
    )
    await bucket.delete(ready.instance_id)
    await rig.until(
        lambda: rig.states[-2:] == [(ready.instance_id, None), (ready.instance_id, S.READY)]
    )


async def test_instances_are_written_together_and_a_late_answer_holds_up_no_other() -> None:
    bucket: Any = _SlowBucket()
    effects: Any = _Leads()
    publisher = InstancePublisher(bucket, ManualClock(), effects)
    running = asyncio.create_task(publisher.run())
    for index in range(AT_ONCE + 1):
        publisher.publish(instance("m", f"i{index:02}"))
    async with asyncio.timeout(20.0):
        await bucket.many.wait()
        assert bucket.under_way == AT_ONCE, (
            "as many as are bounded, none waits for another's answer"
        )
        bucket.answered.set()
        await bucket.all.wait()
    running.cancel()


class _Leads:
    def check(self) -> None:
        """It does."""


class _SlowBucket:
    """Answers no write before it is told to."""

    def __init__(self) -> None:
        self.under_way, self.written = 0, 0
        self.many, self.all, self.answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def put(self, key: str, value: object, *, sent: object = None) -> None:
        self.under_way += 1
        if self.under_way == AT_ONCE:
            self.many.set()
        await self.answered.wait()
        self.written += 1
        if self.written == AT_ONCE + 1:
            self.all.set()
