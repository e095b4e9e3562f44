"""Held requests from arrival to first token: told how it goes, refused beyond the bounds, let go
when nobody waits.
"""

import asyncio
import re
from dataclasses import replace

import openai
import pytest

from pilotlight.common.clock import SystemClock, moment_of
from pilotlight.common.messages.demand import DEMAND_SUBJECTS, DemandVector
from pilotlight.common.messages.phases import PHASES_SUBJECT, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import loader_report_subject
from pilotlight.gateway.serving.testing import NODE, entries_of, loader_report
from pilotlight.gateway.testing import DIGEST
from pilotlight.policy.cluster import Transfer
from pilotlight.policy.ids import ModelName
from pilotlight.policy.plan import InstanceState

pytestmark = pytest.mark.anyio

ANSWER = "The quick brown fox 😀 jumps over naïve 你好 dogs."
FOX = ModelName("fox")


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
        world.http.post(
            "/v1/completions",
            json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True},
        )
    )
    await heard.wait()
    (demand,) = vectors[0].demands
    assert (demand.model, demand.waiting) == (FOX, 1)
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
    assert re.fullmatch(
        r": pilotlight queue=0 phase=fetch progress=0\.42 elapsed=\d+\.\ds", comments[-1]
    )
    await world.until(lambda: vectors[-1].demands == ())
    await world.until(lambda: any(report.first_token is not None for report in reports))
    phases = {phase.name: phase for report in reports for phase in report.phases}
    assert set(phases) == {"queue", "submit", "deliver"}
    first = next(report.first_token for report in reports if report.first_token)
    assert phases["queue"].start_s == first.arrived_s
    assert phases["submit"].start_s == worker.shown.at_s
    assert phases["deliver"].start_s == worker.sampled.at_s
    assert phases["deliver"].end_s == first.at_s
    assert all(
        phase.start_s <= phase.end_s and phase.process == "gateway" for phase in phases.values()
    )
    # Warm: no comment, no phases.
    before = len(reports)
    warm = await world.http.post(
        "/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True}
    )
    assert ": pilotlight" not in warm.text
    assert len(reports) == before


async def test_two_held_requests_end_one_cold_start(world):
    reports: list[PhaseReport] = []

    async def keep(report):
        reports.append(report)
        return PhasesKept()

    await world.bus.serve(PHASES_SUBJECT, PhaseReport, keep)
    worker = await world.worker(ready=False)
    asking = [
        asyncio.create_task(world.client.completions.create(model="fox", prompt="x", max_tokens=99))
        for _ in range(3)
    ]
    await world.until(lambda: world.serving.queue.held == 3)
    await worker.ready()
    answers = await asyncio.gather(*asking)
    assert [answer.choices[0].text for answer in answers] == [ANSWER] * 3
    await world.until(lambda: any(report.first_token for report in reports))
    assert len([report for report in reports if report.first_token]) == 1


async def test_a_full_queue_is_429(make_world):
    world = await make_world(max_held=2, max_held_per_model=2)
    asking = [
        asyncio.create_task(world.client.completions.create(model="fox", prompt="x", max_tokens=99))
        for _ in range(2)
    ]
    await world.until(lambda: world.serving.queue.held == 2)
    response = await world.http.post(
        "/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": True}
    )
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "too_many_held"
    refused = {"model": "fox", "status": "too_many_held"}
    assert world.metrics.get_sample_value("pilotlight_requests_total", refused) == 1
    with pytest.raises(openai.RateLimitError):
        await world.client.completions.create(model="fox", prompt="x", max_tokens=99)
    await world.worker()
    await asyncio.gather(*asking)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place(world, stream):
    vectors, _ = await demand_log(world.bus)
    asking = asyncio.create_task(
        world.http.post(
            "/v1/completions",
            json={"model": "fox", "prompt": "x", "max_tokens": 99, "stream": stream},
        )
    )
    await world.until(lambda: world.serving.queue.held == 1 and bool(vectors))
    asking.cancel()
    await world.until(lambda: world.serving.queue.held == 0)
    await world.until(lambda: vectors[-1].demands == ())
    await world.until(lambda: bool(world.usage.rows))
    assert world.usage.rows[0]["status"] == "cancelled"
    assert world.usage.rows[0]["output_tokens"] == 0


async def test_stopping_lets_held_requests_go(make_world):
    world = await make_world(drain_s=20.0)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99})
    )
    await world.until(lambda: world.serving.queue.held == 1)
    await world.server.stop()
    response = await asking
    assert response.status_code == 503
    assert "stopping" in response.json()["error"]["message"]


async def test_what_runs_past_the_drain_may_be_asked_again(make_world):
    """A request without an answer gets 503, and not the 500 of a bug."""
    world = await make_world(drain_s=1.0)
    worker = await world.worker()
    worker.script = lambda submit: entries_of(submit, [], finish=None)
    asking = asyncio.create_task(
        world.http.post("/v1/completions", json={"model": "fox", "prompt": "x", "max_tokens": 99})
    )
    await worker.until(lambda: len(worker.submits) == 1)
    await world.server.stop()
    response = await asking
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "stopping" in response.json()["error"]["message"]
    assert world.usage.rows[0]["status"] == "cancelled"
