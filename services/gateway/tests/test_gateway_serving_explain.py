"""Why a held request got no instance: the error names what is known at its deadline."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import openai
import pytest

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import DatabaseUnavailable
from pilotlight.gateway.serving.explain import Explainer
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import model

pytestmark = pytest.mark.anyio


async def test_nobody_leads(make_world):
    world = await make_world(hold_timeout_s=0.2, hold_slo_factor=0)
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    assert (caught.value.status_code, caught.value.code) == (503, "control_plane_unavailable")
    response = await world.http.post(
        "/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True}
    )
    assert response.status_code == 200
    assert "event: error" in response.text
    assert "control_plane_unavailable" in response.text


class Nothing:
    """A fleet without instances, and without starts."""

    def serving(self, name):
        return []

    def instances(self, name):
        return []

    def failed_start(self, name, digest):
        return None


class Written:
    """One decision; reading it takes a while."""

    def __init__(self, clock, age_s, outcome):
        self._clock = clock
        self._row = {
            "at": clock.wall() - timedelta(seconds=age_s),
            "reasons": ["nothing fits"],
            "outcome": outcome,
        }

    async def decisions(self, model, limit):
        self._clock.advance(0.5)
        return [self._row]


class Unread:
    """No database."""

    async def decisions(self, model, limit):
        raise DatabaseUnavailable("it is away")


@pytest.mark.parametrize(
    ("age_s", "outcome", "told"),
    [
        (19.999, {"started": "i"}, True),
        (20.1, {"started": "i"}, False),
        (20.1, {"refused": "no_room"}, True),
        (119.0, {"refused": "no_room"}, True),
        (121.0, {"refused": "no_room"}, False),
    ],
)
async def test_what_was_decided_meanwhile_and_a_refusal_that_stands_are_told(age_s, outcome, told):
    clock = ManualClock()
    written = Written(clock, age_s, outcome)
    explainer = Explainer(Nothing(), written, clock, lambda: None)
    error = await explainer.why(model("fox"), clock.monotonic_s() - 20.0)
    assert ("nothing fits" in str(error)) is told
    assert ("no scheduler has acted" in str(error)) is not told


async def test_a_reason_that_cannot_be_read_is_not_the_schedulers_silence():
    clock = ManualClock()
    explainer = Explainer(Nothing(), Unread(), clock, lambda: None)
    error = await explainer.why(model("fox"), clock.monotonic_s() - 20.0)
    assert error.code == DatabaseUnavailable.code
    assert "fox took no request within 20 s: why cannot be read: it is away" in str(error)


async def test_deadline_names_the_failed_start(make_world):
    world = await make_world(hold_timeout_s=0.3, hold_slo_factor=0)
    worker = await world.worker(ready=False)
    worker.instance = replace(
        worker.instance, reason="source_unavailable: model.safetensors is gone"
    )
    await worker.ready(InstanceState.FAILED)
    await world.until(lambda: bool(world.serving.fleet.instances()))
    with pytest.raises(openai.InternalServerError, match="is gone") as caught:
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    assert (caught.value.status_code, caught.value.code) == (503, "source_unavailable")


async def test_deadline_names_a_failure_that_is_no_longer_shown(make_world):
    world = await make_world(hold_timeout_s=0.3, hold_slo_factor=0)
    worker = await world.worker(ready=False)
    worker.instance = replace(worker.instance, reason="corrupt_chunk: chunk 3")
    await worker.ready(InstanceState.FAILED)
    await world.until(lambda: bool(world.serving.fleet.instances()))
    await (await world.bus.bucket(INSTANCES)).delete(worker.instance.instance_id)
    await world.until(lambda: not world.serving.fleet.instances())
    with pytest.raises(openai.InternalServerError, match="chunk 3") as caught:
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    assert caught.value.code == "corrupt_chunk"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_changed_source_is_told_at_once(world, stream):
    asking = asyncio.create_task(
        world.http.post(
            "/v1/completions",
            json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": stream},
        )
    )
    await world.until(lambda: world.serving.queue.held == 1)
    worker = await world.worker(ready=False)
    other = replace(
        worker.instance,
        instance_id="inst-other",
        digest="another",
        reason="source_changed: as registered before",
    )
    await (await world.bus.bucket(INSTANCES)).put(
        "inst-other", replace(other, state=InstanceState.FAILED)
    )
    await world.until(lambda: bool(world.serving.fleet.instances()))
    assert world.serving.queue.held == 1, "another checkpoint under that name"
    worker.instance = replace(worker.instance, reason="source_changed: model.safetensors is gone")
    await worker.ready(InstanceState.FAILED)
    response = await asking
    assert response.status_code == (200 if stream else 503)
    assert "source_changed" in response.text
    assert "is gone. Register the model again" in response.text
    assert world.serving.queue.held == 0


async def test_deadline_names_the_phase(make_world):
    world = await make_world(hold_timeout_s=0.3, hold_slo_factor=0)
    worker = await world.worker(ready=False)
    await worker.ready(InstanceState.LOADING)
    await world.until(lambda: bool(world.serving.fleet.instances()))
    with pytest.raises(openai.InternalServerError, match="phase load") as caught:
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    assert caught.value.code == "deadline_exceeded"


async def test_deadline_names_what_failed_meanwhile_and_not_the_next_try(make_world):
    world = await make_world(hold_timeout_s=2.0, hold_slo_factor=0)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99})
    )
    await world.until(lambda: world.serving.queue.held == 1)
    worker = await world.worker(ready=False)
    worker.instance = replace(worker.instance, reason="host_pool_full: there is no room")
    await worker.ready(InstanceState.FAILED)
    bucket = await world.bus.bucket(INSTANCES)
    await bucket.put(
        "inst-next",
        replace(worker.instance, instance_id="inst-next", state=InstanceState.LOADING, reason=""),
    )
    await world.until(lambda: len(world.serving.fleet.instances()) == 2)
    response = await asking
    assert response.status_code == 503
    assert "host_pool_full: there is no room" in response.text
