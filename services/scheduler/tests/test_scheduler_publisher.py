"""The bucket ``instances``, kept as the rows say."""

from dataclasses import replace

import pytest

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.testing import ReconnectingBus
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Epoch, InstanceId, WorkerId
from pilotlight.policy.plan import InstanceState
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
