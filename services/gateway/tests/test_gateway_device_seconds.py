"""Device-seconds: for whom starts are noted, and what each key is told that it took."""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as evolved
from sqlalchemy import URL, func, insert, select

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.envelope import Timed
from pilotlight.common.messages.reports import WorkerReport
from pilotlight.common.messages.tokens import Submit, TokenEntry
from pilotlight.gateway.admin.testing import (
    AdminWorld,
    database_away,
)
from pilotlight.gateway.records import start_costs
from pilotlight.gateway.records.start_costs import StartCosts
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.serving.queue import PendingQueue
from pilotlight.gateway.serving.route import Router
from pilotlight.gateway.serving.start_watch import StartWatch
from pilotlight.gateway.serving.starts import ColdStart
from pilotlight.gateway.serving.testing import ScriptedWorker, entries_of
from pilotlight.gateway.serving.ticket import Ticket
from pilotlight.gateway.testing import model_of
from pilotlight.policy.admission import QueueBounds
from pilotlight.policy.ids import Epoch, GatewayId, InstanceId, ModelName, WorkerId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.request import FinishReason

pytestmark = pytest.mark.anyio
MODEL = model_of("fox", vocab_size=10)


def at_once(coroutine: Any) -> None:
    with suppress(StopIteration):
        coroutine.send(None)
        raise AssertionError("it waits for something")


class Noted:
    """What was told of starts."""

    def __init__(self) -> None:
        self.holds: list[tuple[str, dict[str, int]]] = []
        self.costs: list[tuple[str, str, str, float]] = []

    def held(self, instance_id: InstanceId, waited: Mapping[str, int]) -> None:
        self.holds.append((instance_id, dict(waited)))

    def took(
        self, instance_id: InstanceId, worker_id: WorkerId, model: ModelName, device_s: float
    ) -> None:
        self.costs.append((instance_id, worker_id, model, device_s))


class Watched:
    """A gateway's queue and fleet, fed by hand."""

    def __init__(self) -> None:
        self.bus: Any = SimpleNamespace(connected=True)
        clock = ManualClock()
        self.fleet = Fleet(self.bus, clock, SimpleNamespace())
        bounds = QueueBounds(total_requests=9, model_requests=9)
        self.queue = PendingQueue(Router(self.fleet, clock), clock, bounds)
        self.fleet.on_change(self.queue.pump)
        self.noted = Noted()
        StartWatch(self.fleet, self.queue, self.noted)

    def ask(self, key_id: str, cold_start: ColdStart = ColdStart.ALLOW) -> None:
        self.queue.enter(
            Ticket(
                model=MODEL.name,
                digest=MODEL.digest,
                needed_tokens=2,
                held_tokens=1,
                since_s=0.0,
                deadline_s=9.0,
                cold_start=cold_start,
                key_id=key_id,
            )
        )

    def show(self, name: str, state: InstanceState | None) -> ScriptedWorker:
        worker = ScriptedWorker(self.bus, f"w-{name}", name, MODEL, lambda _: [])
        worker.instance = replace(worker.instance, state=state or InstanceState.GONE)
        shown = None if state is None else Timed(worker.instance)
        at_once(self.fleet._on_instance(name, shown))
        return worker

    def report(self, worker: ScriptedWorker, start_device_s: float) -> None:
        report = worker._report()
        held = tuple(replace(one, start_device_s=start_device_s) for one in report.facts.held)
        facts = replace(report.facts, held=held)
        told = WorkerReport(facts=facts, incarnation=report.incarnation, epoch_seen=Epoch(1))
        at_once(self.fleet.reports.hear_worker(told))


def test_a_start_is_for_those_that_wait_when_it_is_heard_of() -> None:
    gateway = Watched()
    for key_id in ("a", "b", "a"):
        gateway.ask(key_id)
    gateway.show("inst-1", InstanceState.PLANNED)
    gateway.ask("late")
    gateway.show("inst-1", InstanceState.LOADING)
    assert gateway.noted.holds == [("inst-1", {"a": 2, "b": 1})]


@pytest.mark.parametrize("state", [InstanceState.READY, InstanceState.FAILED])
def test_what_was_there_before_is_not_for_those_that_come(state: InstanceState) -> None:
    gateway = Watched()
    gateway.ask("a")
    gateway.show("inst-1", state)
    assert gateway.noted.holds == []


def test_a_start_for_which_nobody_waits_is_nobodys() -> None:
    gateway = Watched()
    gateway.show("inst-1", InstanceState.PLANNED)
    gateway.ask("late")
    gateway.show("inst-1", InstanceState.FETCHING)
    assert gateway.noted.holds == []


def test_what_a_load_took_is_told_once() -> None:
    gateway = Watched()
    worker = gateway.show("inst-1", InstanceState.LOADING)
    gateway.report(worker, 0.0)
    assert gateway.noted.costs == []
    for _ in range(3):
        gateway.report(worker, 2.5)
        gateway.show("inst-1", InstanceState.READY)
    assert gateway.noted.costs == [("inst-1", "w-inst-1", "fox", 2.5)]
    gateway.show("inst-1", None)
    assert gateway.noted.costs == [("inst-1", "w-inst-1", "fox", 2.5)]


async def test_device_seconds_of_all_choices_and_attempts(make_world: Any) -> None:
    """A worker says of each token what its attempt had so far; one that is refused says nothing."""

    world = await make_world()

    def costing(submit: Submit) -> list[TokenEntry]:
        return [
            evolved(entry, device_s=0.25 * (1 + entry.seq - len(submit.output_ids)))
            for entry in entries_of(submit, world.ids("The quick fox"))
        ]

    worker = await world.worker()
    worker.script = costing
    await world.client.chat.completions.create(
        model="fox", messages=[{"role": "user", "content": "hello"}], n=2
    )
    tokens = len(world.ids("The quick fox"))
    (row,) = world.usage.rows
    assert row["device_s"] == 2 * 0.25 * (tokens + 1)


async def test_device_seconds_of_an_attempt_that_was_lost_are_kept(make_world: Any) -> None:
    world = await make_world()

    def dying(submit: Submit) -> list[TokenEntry]:
        entries = entries_of(submit, world.ids("The quick fox"))
        if submit.attempt > 1:
            return [evolved(entry, device_s=0.5) for entry in entries]
        lost = evolved(
            entries[-1], seq=1, finish=FinishReason.ERROR, code="worker_lost", message="gone"
        )
        return [evolved(each, device_s=0.25) for each in (entries[0], lost)]

    worker = await world.worker()
    worker.script = dying
    await world.client.chat.completions.create(
        model="fox", messages=[{"role": "user", "content": "hello"}]
    )
    (row,) = world.usage.rows
    assert row["device_s"] == 0.75


# In the database.


@pytest.fixture
def world(fresh_admin: AdminWorld) -> AdminWorld:
    return fresh_admin


def costs_of(world: AdminWorld, gateway: str) -> StartCosts:
    context = world.context
    return StartCosts(world.database, context.clock, context.background, GatewayId(gateway))


async def test_each_start_costs_once_whoever_tells_of_it(
    world: AdminWorld, module_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways held requests for it and hear what it took; one is there twice."""
    monkeypatch.setattr(start_costs, "AGAIN_S", 0.01)
    instance_id, worker_id = InstanceId("inst-1"), WorkerId("w-1")
    last = costs_of(world, "gw-2")
    with database_away(module_database):
        await last.start()
        last.held(instance_id, {"b": 1})
        last.took(instance_id, worker_id, ModelName("fox"), 8.0)
        await last.stop()
    assert await costs_in(world) == (0, 0)
    await last.start()
    await last.stop()
    assert await costs_in(world) == (1, 1)
    for gateway, waited in (("gw-1", {"a": 2}), ("gw-2", {"a": 1, "b": 1})):
        costs = costs_of(world, gateway)
        await costs.start()
        costs.held(instance_id, waited)
        costs.took(instance_id, worker_id, ModelName("fox"), 8.0)
        await costs.stop()
    assert await costs_in(world) == (3, 1)
    found = (await world.http.get("/usage")).json()["usage"]
    assert [(one["key_id"], one["requests"], one["start_device_s"]) for one in found] == [
        ("a", 0, 6.0),
        ("b", 0, 2.0),
    ]


async def costs_in(world: AdminWorld) -> tuple[int, int]:
    """Rows of holds and of costs."""
    async with world.database.reading() as connection:
        holds, costs = [
            (await connection.execute(select(func.count()).select_from(table))).scalar_one()
            for table in (tables.start_holds, tables.start_costs)
        ]
        return holds, costs


async def test_usage_is_what_a_sum_by_hand_says_and_no_more_than_devices_had(
    world: AdminWorld,
) -> None:
    rng, first = random.Random(20), datetime(2026, 3, 1, tzinfo=UTC)
    keys, models = ("a", "b", "c"), ("fox", "owl")
    expected: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    usage: list[dict[str, Any]] = []
    holds: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []

    def moment() -> datetime:
        return first + timedelta(hours=rng.uniform(0, 72))

    for number in range(200):
        at, model, key_id = moment(), rng.choice(models), rng.choice(keys)
        device_s = rng.randrange(1000) / 64
        usage.append(
            {
                "at": at,
                "model": model,
                "key_id": key_id,
                "request_id": f"req-{number}",
                "prompt_tokens": 1,
                "output_tokens": 1,
                "status": "ok",
                "device_s": device_s,
            }
        )
        expected[at.date().isoformat(), key_id, model][0] += device_s
    for number in range(60):
        model, instance_id = rng.choice(models), f"inst-{number}"
        waited: Counter[str] = Counter()
        for gateway in ("gw-1", "gw-2"):
            for key_id in rng.sample(keys, rng.randrange(len(keys))):
                requests = rng.randrange(1, 5)
                waited[key_id] += requests
                row = {"gateway_id": gateway, "key_id": key_id, "requests": requests}
                holds.append({**row, "instance_id": instance_id, "at": first})
        times, total_s = [moment() for _ in range(1 + number % 2)], 0.0
        for worker, at in enumerate(times):
            device_s = rng.randrange(1000) / 64
            total_s += device_s
            row = {"worker_id": f"w-{worker}", "model": model, "at": at, "device_s": device_s}
            costs.append({**row, "instance_id": instance_id})
        for key_id, requests in (waited or Counter({"": 1})).items():
            share = requests / (waited.total() or 1)
            expected[min(times).date().isoformat(), key_id, model][1] += total_s * share
    async with world.database.unit_of_work() as work:
        for table, rows in (
            (tables.usage, usage),
            (tables.start_holds, holds),
            (tables.start_costs, costs),
        ):
            await work.connection.execute(insert(table), rows)
    since = {"since": "2026-03-01T00:00:00Z"}
    found = (await world.http.get("/usage", params=since)).json()["usage"]
    assert {
        (one["day"], one["key_id"], one["model"]): [one["device_s"], one["start_device_s"]]
        for one in found
    } == {which: pytest.approx(both, abs=1e-5) for which, both in expected.items()}
    assert sum(one["requests"] for one in found) == len(usage)
    passed_s = sum(row["device_s"] for row in (*usage, *costs))
    told_s = sum(one["device_s"] + one["start_device_s"] for one in found)
    assert {one["idle_device_s"] for one in found} == {0.0}
    assert told_s == pytest.approx(passed_s, abs=1e-3)
    by_model = (await world.http.get("/usage/models", params=since)).json()["models"]
    assert [one.pop("model") for one in by_model] == sorted(models)
    for model, sums in zip(sorted(models), by_model, strict=True):
        of_model = [one for one in found if one["model"] == model]
        assert sums == pytest.approx(
            {name: sum(one[name] for one in of_model) for name in sums}, abs=1e-4
        )
    (one_model,) = (await world.http.get("/usage/models", params={**since, "model": "owl"})).json()[
        "models"
    ]
    assert one_model == {"model": "owl", **by_model[1]}
    last = {**since, "until": "2026-03-02T00:00:00Z"}
    assert (await world.http.get("/usage", params=last)).json()["usage"] == [
        one for one in found if one["day"] == "2026-03-01"
    ]
