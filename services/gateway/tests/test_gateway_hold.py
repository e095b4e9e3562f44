"""Held requests: bounded, earliest deadline first, told how it goes, let go when nobody waits."""

import asyncio
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import openai
import pytest

from pilotlight.common.buckets import INSTANCES
from pilotlight.common.clock import ManualClock, SystemClock, moment_of
from pilotlight.common.errors import TooManyHeld, TransientError
from pilotlight.common.messages.demand import DEMAND_SUBJECTS, DemandVector
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import loader_report_subject
from pilotlight.gateway.hold import Hold, Ticket
from pilotlight.gateway.testing import DIGEST, NODE, loader_report
from pilotlight.policy.admission import HoldBounds
from pilotlight.policy.types import InstanceState, ModelName, Transfer

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
FOX = ModelName("fox")
CAT = ModelName("cat")


@dataclass
class Slots:
    """A router with so many free slots, and so many of instances that are loading."""

    free: int = 0
    loading: int = 0
    handed_tokens: int = 0
    ready: bool = False
    answered_unused: int = 0
    seen: list = field(default_factory=list)

    def pick(self, model, needed_tokens, siblings):
        return SimpleNamespace(instance=SimpleNamespace(instance_id="inst-0"), serving=True) if self.free else None

    def pick_open(self, model, held_tokens, siblings):
        found = self.loading and not self.free
        return SimpleNamespace(instance=SimpleNamespace(instance_id="inst-1"), serving=False) if found else None

    def handed(self, instance_id, tokens):
        self.handed_tokens += tokens

    def is_ready(self, instance_id):
        return self.ready

    def sent(self, instance_id):
        if instance_id == "inst-1":
            self.loading -= 1
        else:
            self.free -= 1

    def answered(self, instance_id, *, accepted):
        self.free += 1
        self.answered_unused += not accepted


def held(slots=None, **bounds):
    clock = ManualClock()
    return Hold(slots or Slots(), clock, HoldBounds(**bounds)), clock


def ticket(clock, deadline_in_s, model=FOX):
    now_s = clock.monotonic_s()
    return Ticket(
        model=model,
        digest="d",
        needed_tokens=1,
        held_tokens=7,
        since_s=now_s,
        deadline_s=now_s + deadline_in_s,
        trace_parent="00-a-b-01",
    )


async def test_earliest_deadline_first():
    slots = Slots()
    hold, clock = held(slots)
    places = {deadline_s: hold.enter(ticket(clock, deadline_s)) for deadline_s in (30, 10, 20, 40)}
    assert [hold.ahead(places[deadline_s]) for deadline_s in (10, 20, 30, 40)] == [0, 1, 2, 3]
    for count, deadline_s in enumerate((10, 20, 30, 40)):
        slots.free = 1
        hold.pump(FOX)
        assert places[deadline_s].assigned is not None
        assert hold.held == 3 - count


async def test_nobody_is_ahead_of_one_that_has_just_got_its_instance():
    slots = Slots()
    hold, clock = held(slots)
    place = hold.enter(ticket(clock, 10))
    slots.free = 1
    hold.pump(FOX)
    # The line is empty and forgotten before the request's own task hears of its instance.
    assert hold.demand() == ()
    assert hold.ahead(place) == 0


async def test_a_returning_request_keeps_its_turn():
    slots = Slots()
    hold, clock = held(slots, total_requests=2, model_requests=2)
    late = hold.enter(ticket(clock, 50))
    hold.enter(ticket(clock, 60))
    early = hold.enter(ticket(clock, 5), returning=True)
    slots.free = 1
    hold.pump(FOX)
    assert early.assigned is not None
    assert late.assigned is None


async def test_nobody_overtakes_the_line():
    slots = Slots()
    hold, clock = held(slots)
    first = hold.enter(ticket(clock, 10))
    slots.free = 1
    second = hold.enter(ticket(clock, 20))
    assert first.assigned is not None
    assert second.assigned is None


async def test_bounds():
    hold, clock = held(total_requests=3, model_requests=2)
    hold.enter(ticket(clock, 10))
    hold.enter(ticket(clock, 10))
    with pytest.raises(TooManyHeld) as of_model:
        hold.enter(ticket(clock, 10))
    assert of_model.value.retry_after_s >= 1
    hold.enter(ticket(clock, 10, CAT))
    with pytest.raises(TooManyHeld):
        hold.enter(ticket(clock, 10, ModelName("dog")))
    assert hold.held == 3


async def test_leaving_frees_the_place():
    hold, clock = held(total_requests=1, model_requests=1)
    with hold.enter(ticket(clock, 10)):
        assert hold.held == 1
    assert hold.held == 0
    assert hold.demand() == ()
    hold.enter(ticket(clock, 10))


async def test_an_unused_assignment_goes_to_the_next():
    slots = Slots()
    hold, clock = held(slots)
    with hold.enter(ticket(clock, 10)) as first:
        second = hold.enter(ticket(clock, 20))
        slots.free = 1
        hold.pump(FOX)
        assert first.assigned is not None
    assert slots.answered_unused == 1
    assert second.assigned is not None


async def test_demand_has_ages_as_of_now():
    hold, clock = held()
    hold.arrived(FOX)
    place = hold.enter(ticket(clock, 10))
    clock.advance(0.5)
    hold.arrived(FOX)
    hold.enter(ticket(clock, 10))
    (demand,) = hold.demand()
    assert (demand.model, demand.waiting, demand.arrivals) == (FOX, 2, 2)
    assert demand.oldest_age_s == pytest.approx(0.5)
    assert demand.deadline_in_s == pytest.approx(9.5)
    assert demand.trace_parent == "00-a-b-01"
    assert place.demanded_s == clock.monotonic_s()


async def test_closing_lets_everybody_go():
    hold, clock = held()
    place = hold.enter(ticket(clock, 10))
    hold.close(TransientError("stopping"))
    assert await place.decided(0)
    with pytest.raises(TransientError, match="stopping"):
        place.take()
    with pytest.raises(TransientError, match="stopping"):
        hold.enter(ticket(clock, 10))


async def test_what_an_instance_that_loads_was_given_is_waited_for_until_that_is_ready():
    slots = Slots()
    hold, clock = held(slots)
    late, early = hold.enter(ticket(clock, 20)), hold.enter(ticket(clock, 10))
    slots.loading = 1
    changes = []
    hold.on_change = lambda: changes.append(hold.demand())
    hold.pump(FOX)
    assert early.assigned is not None
    assert late.assigned is None
    assert early.waited
    assert (hold.held, slots.handed_tokens) == (1, 7)
    clock.advance(3)
    (demand,) = hold.demand()
    assert (demand.waiting, demand.oldest_age_s, demand.deadline_in_s) == (2, pytest.approx(3), pytest.approx(7))
    # Ready: whoever was given to it waits no more, although its attempt goes on.
    slots.ready = True
    hold.pump(FOX)
    (demand,) = hold.demand()
    assert (demand.waiting, demand.deadline_in_s, slots.handed_tokens) == (1, pytest.approx(17), 0)
    assert changes[-1][0].waiting == 1
    hold.attempted(early)
    assert slots.handed_tokens == 0, "once"


@pytest.mark.parametrize("how", ["attempted", "left"])
async def test_an_attempt_that_ends_while_the_instance_loads_is_no_demand(how):
    slots = Slots(loading=1)
    hold, clock = held(slots)
    with hold.enter(ticket(clock, 10)) as place:
        assert place.waited
        assert [demand.waiting for demand in hold.demand()] == [1]
        if how == "attempted":
            place.take()
    if how == "attempted":
        assert [demand.waiting for demand in hold.demand()] == [1], "its attempt is under way"
        hold.attempted(place)
    assert hold.demand() == ()
    assert slots.handed_tokens == 0


async def test_closing_lets_those_go_that_wait_elsewhere():
    hold, clock = held(Slots(loading=1))
    place = hold.enter(ticket(clock, 10))
    place.take()
    hold.close(TransientError("stopping"))
    assert hold.demand() == ()
    assert isinstance(place.error, TransientError)


# The whole gateway, cold.


async def demand_log(bus):
    vectors: list[DemandVector] = []
    heard = asyncio.Event()

    async def listen(vector):
        vectors.append(vector)
        heard.set()

    await bus.subscribe(DEMAND_SUBJECTS, DemandVector, listen)
    return vectors, heard


async def test_cold_request_end_to_end(world):
    reports: list[PhaseReport] = []

    async def keep(report):
        reports.append(report)
        return PhasesKept()

    await world.bus.serve(PHASES_SUBJECT, PhaseReport, keep)
    vectors, heard = await demand_log(world.bus)
    worker = await world.worker(ready=False)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True})
    )
    await heard.wait()
    (demand,) = vectors[0].demands
    assert (demand.model, demand.waiting, demand.arrivals) == (FOX, 1, 1)
    assert vectors[0].gateway_id == world.serving.gateway_id
    await worker.ready(InstanceState.FETCHING)
    transfer = Transfer(digest=DIGEST, source="file", done_bytes=42, total_bytes=100)
    await world.bus.publish(loader_report_subject(NODE), loader_report(transfers=(transfer,)))
    await world.until(lambda: world.serving.fleet.progress(FOX, DIGEST).fetched == 0.42)
    # A client hears of it within a second.
    count = len(vectors)
    await world.until(lambda: len(vectors) >= count + 5)
    # Neither is heard at once: what they were under way belongs to the phases that they lead to.
    now = moment_of(SystemClock())
    worker.shown, worker.sampled = (replace(now, at_s=now.at_s - seconds) for seconds in (0.3, 0.2))
    await worker.ready()
    response = await asking
    comments = [line for line in response.text.split("\n\n") if line.startswith(": pilotlight")]
    assert re.fullmatch(r": pilotlight queue=0 phase=queue elapsed=\d+\.\ds", comments[0])
    assert re.fullmatch(r": pilotlight queue=0 phase=fetch progress=0\.42 elapsed=\d+\.\ds", comments[-1])
    await world.until(lambda: vectors[-1].demands == ())
    await world.until(lambda: any(report.first_token is not None for report in reports))
    phases = {phase.name: phase for report in reports for phase in report.phases}
    assert set(phases) == {"queue", "submit", "deliver"}
    first = next(report.first_token for report in reports if report.first_token)
    assert phases["queue"].start_s == first.arrived_s
    assert phases["submit"].start_s == worker.shown.at_s
    assert phases["deliver"].start_s == worker.sampled.at_s
    assert phases["deliver"].end_s == first.at_s
    assert all(phase.start_s <= phase.end_s and phase.process == "gateway" for phase in phases.values())
    # Warm: no comment, no phases.
    before = len(reports)
    warm = await world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True})
    assert ": pilotlight" not in warm.text
    assert len(reports) == before


async def test_two_held_requests_end_one_cold_start(world):
    reports: list[PhaseReport] = []

    async def keep(report):
        reports.append(report)
        return PhasesKept()

    await world.bus.serve(PHASES_SUBJECT, PhaseReport, keep)
    worker = await world.worker(ready=False)
    asking = [asyncio.create_task(world.client.completions.create(model="fox", prompt="x", max_tokens=99)) for _ in range(3)]
    await world.until(lambda: world.serving.hold.held == 3)
    await worker.ready()
    answers = await asyncio.gather(*asking)
    assert [answer.choices[0].text for answer in answers] == [ANSWER] * 3
    await world.until(lambda: any(report.first_token for report in reports))
    assert len([report for report in reports if report.first_token]) == 1


async def test_full_hold_is_429(make_world):
    world = await make_world(max_held=2, max_held_per_model=2)
    asking = [asyncio.create_task(world.client.completions.create(model="fox", prompt="x", max_tokens=99)) for _ in range(2)]
    await world.until(lambda: world.serving.hold.held == 2)
    response = await world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "too_many_held"
    with pytest.raises(openai.RateLimitError):
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    await world.worker()
    await asyncio.gather(*asking)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place(world, stream):
    vectors, _ = await demand_log(world.bus)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": stream})
    )
    await world.until(lambda: world.serving.hold.held == 1 and bool(vectors))
    asking.cancel()
    await world.until(lambda: world.serving.hold.held == 0)
    await world.until(lambda: vectors[-1].demands == ())
    await world.until(lambda: bool(world.usage.rows))
    assert world.usage.rows[0]["status"] == "cancelled"
    assert world.usage.rows[0]["output_tokens"] == 0


async def test_nobody_leads(make_world):
    world = await make_world(hold_timeout_s=0.2, hold_slo_factor=0)
    with pytest.raises(openai.InternalServerError) as caught:
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    assert (caught.value.status_code, caught.value.code) == (503, "control_plane_unavailable")
    response = await world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True})
    assert response.status_code == 200
    assert "event: error" in response.text
    assert "control_plane_unavailable" in response.text


async def test_deadline_names_the_failed_start(make_world):
    world = await make_world(hold_timeout_s=0.3, hold_slo_factor=0)
    worker = await world.worker(ready=False)
    worker.instance = replace(worker.instance, reason="source_unavailable: model.safetensors is gone")
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
        world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": stream})
    )
    await world.until(lambda: world.serving.hold.held == 1)
    worker = await world.worker(ready=False)
    other = replace(worker.instance, instance_id="inst-other", digest="another", reason="source_changed: as registered before")
    await (await world.bus.bucket(INSTANCES)).put("inst-other", replace(other, state=InstanceState.FAILED))
    await world.until(lambda: bool(world.serving.fleet.instances()))
    assert world.serving.hold.held == 1, "another checkpoint under that name"
    worker.instance = replace(worker.instance, reason="source_changed: model.safetensors is gone")
    await worker.ready(InstanceState.FAILED)
    response = await asking
    assert response.status_code == (200 if stream else 503)
    assert "source_changed" in response.text
    assert "is gone. Register the model again" in response.text
    assert world.serving.hold.held == 0


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
    asking = asyncio.create_task(world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99}))
    await world.until(lambda: world.serving.hold.held == 1)
    worker = await world.worker(ready=False)
    worker.instance = replace(worker.instance, reason="host_pool_full: there is no room")
    await worker.ready(InstanceState.FAILED)
    bucket = await world.bus.bucket(INSTANCES)
    await bucket.put("inst-next", replace(worker.instance, instance_id="inst-next", state=InstanceState.LOADING, reason=""))
    await world.until(lambda: len(world.serving.fleet.instances()) == 2)
    response = await asking
    assert response.status_code == 503
    assert "host_pool_full: there is no room" in response.text


async def test_stopping_lets_held_requests_go(world):
    asking = asyncio.create_task(world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99}))
    await world.until(lambda: world.serving.hold.held == 1)
    await world.server.stop()
    response = await asking
    assert response.status_code == 503
    assert "stopping" in response.json()["error"]["message"]
