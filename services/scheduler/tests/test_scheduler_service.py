"""The scheduler on a real NATS server and a real PostgreSQL, between a cache, a worker, a loader and a gateway that the tests play.

Time is set by hand: nothing grows old, and no lease of a worker ends, unless a test says so.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, delete, func, insert, select, text, update
from sqlalchemy.pool import NullPool

from pilotlight.common.buckets import INSTANCES, LEADER, Bucket
from pilotlight.common.bus import Bus
from pilotlight.common.clock import ManualClock, moment_of
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.errors import HostPoolFull, ModelNotFound, NoRoom, PilotlightError, StaleCommand
from pilotlight.common.messages.demand import (
    EVICT_SUBJECT,
    WARM_SUBJECT,
    DemandVector,
    Evict,
    Evicting,
    Warm,
    Warming,
    demand_subject,
)
from pilotlight.common.messages.events import EVENT_SUBJECTS, Event
from pilotlight.common.messages.hold import LEADING_KEY, Leading, NodeHold, Peer, WorkerHold
from pilotlight.common.messages.phases import PHASES_SUBJECT, FirstToken, PhaseReport, PhasesKept
from pilotlight.common.messages.reports import LoaderReport, WorkerReport, loader_report_subject, worker_report_subject
from pilotlight.common.messages.room import RELEASE_SUBJECT, RESERVE_SUBJECT, Release, Released, Reserve, Reserved
from pilotlight.common.service import Application
from pilotlight.common.settings import BusSettings, DatabaseSettings
from pilotlight.common.testing import MakeContext, ReconnectingBus, until
from pilotlight.policy.testing import copy, demand, node, worker
from pilotlight.policy.testing import model as a_model
from pilotlight.policy.types import (
    Epoch,
    GatewayId,
    GrantId,
    HeldStage,
    HeldState,
    Instance,
    InstanceId,
    InstanceState,
    Model,
    ModelName,
    NodeFacts,
    NodeId,
    Phase,
    PhaseName,
    RequestId,
    WorkerId,
)
from pilotlight.scheduler import election
from pilotlight.scheduler.app import build
from pilotlight.scheduler.settings import SchedulerSettings

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GATEWAY = GatewayId("gw-1")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
S = InstanceState
H = HeldState


@dataclass
class Rig:
    """The world around the scheduler, and what it was seen to do."""

    bus: Bus
    clock: ManualClock
    owner: Database
    application: Application
    shown: dict[str, Instance | None] = field(default_factory=dict[str, Instance | None])
    states: list[tuple[str, InstanceState | None]] = field(default_factory=list[tuple[str, InstanceState | None]])
    worker_hold: WorkerHold | None = None
    node_hold: NodeHold | None = None
    reserved: list[Reserve] = field(default_factory=list[Reserve])
    released: list[GrantId] = field(default_factory=list[GrantId])
    events: list[Event] = field(default_factory=list[Event])
    refusal: PilotlightError | None = None
    incarnation: str = "a"
    epoch: Epoch = field(default=Epoch(0))
    held: dict[InstanceId, HeldStage] = field(default_factory=dict[InstanceId, HeldStage])
    others: tuple[NodeFacts, ...] = ()
    """Nodes beside the worker's own."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, predicate: Callable[[], Any], at_most_s: float = 8.0) -> Any:
        """Wait for something to have been seen."""
        async with asyncio.timeout(at_most_s), self._changed:
            await self._changed.wait_for(predicate)
        return predicate()

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # the parts that are played

    async def on_shown(self, key: str, instance: Instance | None) -> None:
        self.shown[key] = instance
        self.states.append((key, instance.state if instance is not None else None))
        await self._note()

    async def on_worker_hold(self, command: WorkerHold) -> None:
        self.worker_hold = command
        self.epoch = command.epoch
        await self._note()

    async def on_node_hold(self, command: NodeHold) -> None:
        self.node_hold = command
        await self._note()

    async def on_event(self, event: Event) -> None:
        self.events.append(event)
        await self._note()

    async def on_reserve(self, ask: Reserve) -> Reserved:
        self.reserved.append(ask)
        await self._note()
        if self.refusal is not None:
            raise self.refusal
        return Reserved(grant_id=GrantId(f"grant-{len(self.reserved)}"), evicted_instances=(InstanceId("evicted"),))

    async def on_release(self, ask: Release) -> Released:
        self.released.append(ask.grant_id)
        await self._note()
        return Released()

    async def report(self) -> None:
        """Every report is a moment later than what went before."""
        self.clock.advance(0.01)
        facts = worker(0, memory_bytes=1000, held_stages=tuple(self.held.values()))
        message = WorkerReport(facts=facts, incarnation=self.incarnation, epoch_seen=self.epoch)
        await self.bus.publish(worker_report_subject(facts.worker_id), message)
        for facts in (replace(node(), dataplane_host="10.0.0.1", dataplane_port=7000), *self.others):
            loader = LoaderReport(facts=facts, incarnation="l", epoch_seen=self.epoch)
            await self.bus.publish(loader_report_subject(facts.node_id), loader)

    async def hold(self, instance_id: InstanceId, state: HeldState, **more: Any) -> None:
        """The worker takes up what it was told, and says so."""
        assert self.worker_hold is not None
        order = next(one for one in self.worker_hold.holds if one.instance_id == instance_id)
        self.held[instance_id] = HeldStage(
            instance_id=instance_id,
            generation=order.generation,
            model=order.model.name,
            digest=order.model.digest,
            stage=order.stage,
            state=state,
            device_bytes=order.device_bytes,
            **more,
        )
        await self.report()

    async def demand(self, name: str = "m", waiting: int = 1) -> None:
        await self.demands(**({name: 0.1} if waiting else {}))

    async def demands(self, **ages_s: float) -> None:
        """The gateway's whole demand: one request for each model, of that age."""
        demands = tuple(replace(demand(name), trace_parent=TRACE, oldest_age_s=age_s) for name, age_s in ages_s.items())
        await self.bus.publish(demand_subject(GATEWAY), DemandVector(gateway_id=GATEWAY, demands=demands))

    async def later(self, seconds: float) -> None:
        """Let time pass for everyone: reports go on, and what is held is held."""
        self.clock.advance(seconds)
        await self.report()

    async def tried(self, times: int) -> None:
        """Let time pass, with somebody waiting, until room was asked for so often."""
        for _ in range(30):
            try:
                await self.until(lambda: len(self.reserved) >= times, 0.3)
            except TimeoutError:
                await self.later(0.3)
                await self.demand()
            else:
                return
        pytest.fail(f"room was asked for {len(self.reserved)} times")

    # shorthand

    def instances(self, *states: InstanceState) -> list[Instance]:
        return [one for one in self.shown.values() if one is not None and one.state in states]

    async def shown_as(self, state: InstanceState, but: InstanceId | None = None) -> Instance:
        found: list[Instance] = await self.until(lambda: [one for one in self.instances(state) if one.instance_id != but])
        return found[0]

    async def ordered(self, instance_id: InstanceId) -> None:
        """Wait until the worker has heard that it is to hold the instance."""

        def told() -> bool:
            return self.worker_hold is not None and any(one.instance_id == instance_id for one in self.worker_hold.holds)

        await self.until(told)

    async def ready(self) -> Instance:
        """A cold start, all the way."""
        await self.demand()
        instance = await self.shown_as(S.FETCHING)
        await self.ordered(instance.instance_id)
        await self.hold(instance.instance_id, H.LOADING)
        await self.shown_as(S.LOADING)
        await self.hold(instance.instance_id, H.READY)
        ready = await self.shown_as(S.READY)
        await self.demand(waiting=0)
        return ready

    async def rows(self, statement: Any) -> list[Any]:
        async with self.owner.reading() as connection:
            return list((await connection.execute(statement)).all())

    async def register(self, *models: Model) -> None:
        async with self.owner.unit_of_work() as work:
            await work.connection.execute(delete(tables.models))
            for one in models:
                row = {"name": one.name, "digest": one.digest, "body": to_row_json(one), "created_at": func.now()}
                await work.connection.execute(insert(tables.models).values(**row, updated_at=func.now()))
        event = Event(event_id=f"e{len(self.events)}", kind="model_registered", entity="m", at="")
        await self.bus.publish("v1.event.gateway.model_registered", event)


StartRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
def reconnecting(bus: Bus) -> ReconnectingBus:
    return ReconnectingBus(bus)


@pytest.fixture
async def owner(
    postgres_url: str, database_settings: Callable[[str], DatabaseSettings], module_database: Any
) -> AsyncGenerator[Database]:
    url = module_database.set(drivername="postgresql").render_as_string(hide_password=False)
    owner = Database(DatabaseSettings(database_url=url), "scheduler", ManualClock())
    await owner.start()
    async with owner.unit_of_work() as work:
        for table in (
            tables.lease,
            tables.instances,
            tables.decisions,
            tables.cold_starts,
            tables.estimates,
            tables.models,
            tables.drains,
        ):
            await work.connection.execute(delete(table))
    yield owner
    await owner.stop()


@pytest.fixture
async def new_scheduler(
    reconnecting: Any,
    bus_settings: BusSettings,
    make_context: MakeContext,
    database_settings: Callable[[str], DatabaseSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncGenerator[Callable[[ManualClock], Awaitable[Application]]]:
    started: list[Application] = []
    # A clock that is set forward is no lease that has run out.
    monkeypatch.setattr(election, "LEASE_S", 1e6)

    async def start(clock: ManualClock) -> Application:
        settings = SchedulerSettings(
            nats_url=bus_settings.nats_url, prefix=bus_settings.prefix, database_url=database_settings("scheduler").database_url
        )
        application = await build(make_context("scheduler", settings, clock=clock, bus=reconnecting))
        for component in application.components:
            await component.start()
        started.append(application)
        return application

    yield start
    for application in started:
        for component in reversed(application.components):
            await component.stop()


@pytest.fixture
async def rig(bus: Bus, owner: Database, new_scheduler: Callable[[ManualClock], Awaitable[Application]]) -> AsyncGenerator[Rig]:
    clock = ManualClock()
    rig = Rig(bus=bus, clock=clock, owner=owner, application=Application())
    await rig.register(a_model(keep_alive_s=0.5))
    subscriptions = [
        await bus.subscribe("v1.worker.w0.hold", WorkerHold, rig.on_worker_hold),
        await bus.subscribe("v1.loader.n0.hold", NodeHold, rig.on_node_hold),
        await bus.subscribe(EVENT_SUBJECTS, Event, rig.on_event),
        await bus.serve(RESERVE_SUBJECT, Reserve, rig.on_reserve),
        await bus.serve(RELEASE_SUBJECT, Release, rig.on_release),
    ]
    bucket = await bus.bucket(INSTANCES)
    watching = asyncio.create_task(bucket.watch(Instance, rig.on_shown))
    rig.application = await new_scheduler(clock)
    clock.advance(1.1)
    await rig.report()
    await rig.until(lambda: rig.worker_hold is not None)
    yield rig
    watching.cancel()
    await asyncio.wait({watching})
    for subscription in subscriptions:
        await subscription.end()


async def test_demand_becomes_an_instance_a_command_readiness_and_a_record(rig: Rig) -> None:
    ready = await rig.ready()
    instance_id = ready.instance_id

    assert [one.model for one in rig.reserved] == ["m"]
    assert sum(rig.reserved[0].host_part_bytes) == 60
    assert ready.placements[0].grant_id == "grant-1"
    assert rig.worker_hold is not None
    (hold,) = rig.worker_hold.holds
    assert hold.device_bytes == ready.placements[0].device_bytes == rig.reserved[0].device_bytes
    assert hold.trace_parent.split("-")[1] == TRACE.split("-")[1]
    assert rig.worker_hold.epoch == ready.epoch >= 1
    await rig.until(lambda: rig.node_hold is not None and not rig.node_hold.fetches)

    (row,) = await rig.rows(select(tables.instances))
    assert (row.instance_id, row.state, row.epoch) == (instance_id, "ready", ready.epoch)
    (decision,) = await rig.rows(select(tables.decisions))
    assert decision.instance_id == instance_id
    assert decision.inputs["models"][0]["name"] == "m"
    assert decision.outcome["scheme"]["placements"][0]["worker_id"] == "w0"
    assert [one["worker_ids"] for one in decision.outcome["considered"]] == [["w0"]]
    assert decision.outcome["evicted_instances"] == ["evicted"]
    assert decision.reasons

    now_s, offset_s = rig.clock.monotonic_s(), rig.clock.wall().timestamp() - rig.clock.monotonic_s()
    phase = Phase(name=PhaseName.PREFILL, start_s=now_s, end_s=now_s + 1, wall_offset_s=offset_s, process="worker")
    first = FirstToken(request_id=RequestId("r"), at_s=now_s + 1, wall_offset_s=offset_s, arrived_s=now_s - 0.25)
    report = PhaseReport(instance_id=instance_id, phases=(phase,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=2.0)
    (cold,) = await rig.rows(select(tables.cold_starts))
    assert (cold.status, cold.trace_id, cold.ttft_s) == ("done", TRACE.split("-")[1], pytest.approx(1.25))
    assert cold.coverage > 0.95
    assert {one["name"] for one in cold.phases} == {"schedule", "dispatch", "activate", "prefill"}

    def told() -> bool:
        return {one.kind for one in rig.events} >= {"instance_planned", "instance_ready", "cold_start_finished"}

    await rig.until(told)
    seen = [state for key, state in rig.states if key == instance_id]
    assert seen == [S.FETCHING, S.LOADING, S.READY]


async def test_what_is_sent_says_when_and_activation_begins_with_the_last_load(rig: Rig) -> None:
    begun_s = rig.clock.monotonic_s()
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    await rig.until(lambda: rig.node_hold is not None)
    assert rig.worker_hold is not None
    assert rig.node_hold is not None
    for sent in (rig.worker_hold.sent, rig.node_hold.sent, instance.shown):
        assert sent is not None
        assert begun_s <= sent.at_s <= rig.clock.monotonic_s()
    loaded = moment_of(rig.clock)
    rig.clock.advance(0.2)
    await rig.hold(instance.instance_id, H.READY, loaded=loaded)
    ready = await rig.shown_as(S.READY)
    assert ready.shown == moment_of(rig.clock)
    (row,) = await rig.rows(select(tables.instances))
    assert row.body["shown"] is None
    offset_s = loaded.wall_offset_s
    first = FirstToken(request_id=RequestId("r"), at_s=loaded.at_s + 0.5, wall_offset_s=offset_s, arrived_s=begun_s)
    report = PhaseReport(instance_id=ready.instance_id, phases=(), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=2.0)
    (cold,) = await rig.rows(select(tables.cold_starts))
    (activate,) = [one for one in cold.phases if one["name"] == "activate"]
    assert (activate["start_s"], activate["end_s"]) == (loaded.at_s, pytest.approx(loaded.at_s + 0.21))


async def test_a_finished_cold_start_teaches_the_estimate(rig: Rig) -> None:
    ready = await rig.ready()
    now_s, offset_s = rig.clock.monotonic_s(), rig.clock.wall().timestamp() - rig.clock.monotonic_s()
    first = FirstToken(request_id=RequestId("r"), at_s=now_s + 2, wall_offset_s=offset_s, arrived_s=now_s)
    fetch = Phase(name=PhaseName.FETCH, start_s=now_s, end_s=now_s + 0.5, wall_offset_s=offset_s, process="loader")
    report = PhaseReport(instance_id=ready.instance_id, phases=(fetch,), first_token=first)
    await rig.bus.request(PHASES_SUBJECT, report, PhasesKept, deadline_s=2.0)
    await rig.later(10.5)
    async with asyncio.timeout(5):
        while not (rows := await rig.rows(select(tables.estimates))):
            pass
    assert rows[0].body["cold_ttft_s"] == pytest.approx(2.0)
    assert rows[0].body["fetch_bytes_per_s"] == pytest.approx(120.0)


async def test_a_restarted_worker_fails_its_instance_and_demand_starts_another(rig: Rig) -> None:
    ready = await rig.ready()
    rig.held.clear()
    rig.incarnation = "b"
    await rig.demand()
    await rig.report()
    failed = await rig.shown_as(S.FAILED)
    assert failed.instance_id == ready.instance_id
    assert failed.reason.startswith("worker_lost")
    another = await rig.shown_as(S.FETCHING)
    assert another.instance_id != ready.instance_id
    await rig.until(lambda: rig.released == ["grant-1"])
    await rig.ordered(another.instance_id)
    assert rig.worker_hold is not None
    assert [one.instance_id for one in rig.worker_hold.holds] == [another.instance_id]
    await rig.later(2.5)
    await rig.until(lambda: rig.shown[ready.instance_id] is None)


async def test_a_dead_worker_is_noticed_by_its_silence(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    for _ in range(20):
        # A leap of more than half a second is a process that stood still.
        rig.clock.advance(0.4)
        try:
            await rig.until(lambda: bool(rig.instances(S.FAILED)), 0.2)
            break
        except TimeoutError:
            continue
    failed = await rig.shown_as(S.FAILED)
    assert "is gone" in failed.reason


async def test_a_stage_that_failed_fails_its_instance_with_the_workers_reason(rig: Rig) -> None:
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    await rig.hold(instance.instance_id, H.FAILED, reason="source_changed: the file is another one")
    failed = await rig.shown_as(S.FAILED)
    assert failed.reason == "source_changed: the file is another one"
    await rig.until(lambda: "instance_failed" in {one.kind for one in rig.events})


async def test_an_evicted_instance_is_gone_and_forgotten_by_its_worker(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.EVICTED, reason="the cache needs its room")
    gone = await rig.shown_as(S.GONE)
    assert gone.reason == "the cache needs its room"
    await rig.until(lambda: rig.worker_hold is not None and not rig.worker_hold.holds)
    await rig.until(lambda: rig.released == ["grant-1"])


async def test_an_idle_instance_drains_to_zero_after_its_keep_alive(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    await rig.later(0.6)
    await rig.hold(ready.instance_id, H.READY, idle_s=0.0)
    assert not rig.instances(S.DRAINING), "it was in use"
    rig.held[ready.instance_id] = replace(rig.held[ready.instance_id], idle_s=0.6)
    await rig.later(0.6)
    draining = await rig.shown_as(S.DRAINING)
    assert "idle" in draining.reason
    await rig.until(lambda: rig.worker_hold is not None and any(one.draining for one in rig.worker_hold.holds))
    rig.held.clear()
    await rig.later(0.1)
    await rig.shown_as(S.GONE)
    assert [row.kind for row in await rig.rows(select(tables.decisions).order_by(tables.decisions.c.at))] == [
        "cold_start",
        "drain",
    ]


async def test_a_cold_start_that_nobody_waits_for_any_more_is_cancelled(rig: Rig) -> None:
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.demand(waiting=0)
    await rig.later(0.9)
    await rig.later(0.9)
    await rig.shown_as(S.DRAINING)
    await rig.later(0.1)
    await rig.until(lambda: (instance.instance_id, S.GONE) in rig.states)
    (cold,) = await rig.rows(select(tables.cold_starts.c.status))
    assert cold.status in ("open", "abandoned")


async def test_no_room_is_recorded_once_and_tried_again_until_there_is(rig: Rig) -> None:
    rig.refusal = HostPoolFull("the pool is full")
    await rig.demand()
    await rig.tried(3)
    rows = await rig.rows(select(tables.decisions))
    assert [row.outcome["refused"] for row in rows] == ["host_pool_full"]
    assert not rig.shown
    rig.refusal = None
    await rig.tried(4)
    await rig.shown_as(S.FETCHING)


async def test_refusals_that_alternate_are_recorded_once_each(rig: Rig) -> None:
    rig.refusal = HostPoolFull("the pool is full")
    await rig.demand()
    await rig.tried(1)
    for tries in range(2, 6):
        rig.refusal = NoRoom("in use") if tries % 2 == 0 else HostPoolFull("the pool is full")
        await rig.tried(tries)
    rows = await rig.rows(select(tables.decisions))
    assert sorted(row.outcome["refused"] for row in rows) == ["host_pool_full", "no_room"]


async def test_warm_starts_a_model_that_nobody_waits_for(rig: Rig) -> None:
    with pytest.raises(ModelNotFound):
        await rig.bus.request(WARM_SUBJECT, Warm(model=ModelName("nobody")), Warming, deadline_s=2.0)
    warm = Warm(model=ModelName("m"))
    warming = await rig.bus.request(WARM_SUBJECT, warm, Warming, deadline_s=2.0)
    again = await rig.bus.request(WARM_SUBJECT, warm, Warming, deadline_s=2.0)
    assert again == warming
    await rig.later(0.9)
    await rig.later(0.9)
    await rig.ordered(warming.instance_id)
    await rig.hold(warming.instance_id, H.READY)
    ready = await rig.shown_as(S.READY)
    assert ready.instance_id == warming.instance_id, "it is not cancelled, although nobody waits"
    assert await rig.bus.request(WARM_SUBJECT, warm, Warming, deadline_s=2.0) == warming
    await rig.until(lambda: "cold_start_finished" in {one.kind for one in rig.events})
    (cold,) = await rig.rows(select(tables.cold_starts))
    assert (cold.status, cold.ttft_s) == ("done", None)


async def test_warm_says_why_it_cannot(rig: Rig) -> None:
    rig.refusal = NoRoom("everything is in use")
    with pytest.raises(NoRoom, match="everything is in use"):
        await rig.bus.request(WARM_SUBJECT, Warm(model=ModelName("m")), Warming, deadline_s=2.0)


async def test_evict_drains_every_instance(rig: Rig) -> None:
    ready = await rig.ready()
    evicting = await rig.bus.request(EVICT_SUBJECT, Evict(model=ModelName("m")), Evicting, deadline_s=2.0)
    assert evicting.instance_ids == (ready.instance_id,)
    await rig.shown_as(S.DRAINING)
    with pytest.raises(ModelNotFound):
        await rig.bus.request(EVICT_SUBJECT, Evict(model=ModelName("nobody")), Evicting, deadline_s=2.0)


async def test_a_busy_instance_makes_room_for_who_has_waited_for_too_long(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    await rig.register(a_model("m"), a_model("x", part_bytes=40))
    busy = await rig.ready()
    await rig.later(5.0)
    await rig.hold(busy.instance_id, H.READY, in_flight=2)
    await rig.demands(x=100.0)
    draining = await rig.shown_as(S.DRAINING)
    assert draining.instance_id == busy.instance_id
    assert "x has waited for 100" in draining.reason
    (decision,) = await rig.rows(select(tables.decisions).where(tables.decisions.c.kind == "drain"))
    assert decision.outcome["makes_way_for"] == "x"
    assert decision.reasons == [draining.reason]

    def told() -> Any:
        return rig.worker_hold and [one.drain_within_s for one in rig.worker_hold.holds if one.draining]

    (within_s,) = await rig.until(told)
    assert within_s > 0

    # Another leads now: it knows the limit, and for whom the room is, though others ask for it first.
    for component in reversed(rig.application.components):
        await component.stop()
    await new_scheduler(rig.clock)
    rig.worker_hold = None
    await rig.later(1.1)
    await rig.demands(x=101.1, m=0.1)
    assert await rig.until(told) == [within_s]
    rig.held.clear()
    await rig.later(0.1)
    await rig.demands(m=0.2, x=101.2)
    await rig.shown_as(S.GONE)
    assert (await rig.shown_as(S.FETCHING)).model == "x"


async def test_a_deleted_model_is_drained_and_its_stage_still_described(rig: Rig) -> None:
    ready = await rig.ready()
    await rig.register()
    draining = await rig.shown_as(S.DRAINING)
    assert draining.reason == "its model was deleted"
    await rig.until(lambda: rig.worker_hold is not None and any(one.draining for one in rig.worker_hold.holds))
    assert rig.worker_hold is not None
    assert rig.worker_hold.holds[0].instance_id == ready.instance_id


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
    assert all([one.instance_id for one in command.holds] == [ready.instance_id] for command in holds)
    traces = {one.trace_parent.split("-")[1] for command in holds for one in command.holds}
    assert traces == {TRACE.split("-")[1]}, "its cold start is not done: it stays one trace"
    assert [one.instance_id for one in rig.instances(S.READY)] == [ready.instance_id]
    (row,) = await rig.rows(select(tables.instances.c.state))
    assert row.state == "ready"


async def test_a_node_is_told_at_once_from_whom_to_fetch_and_the_next_leader_says_the_same(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    parts = tuple(range(6))
    has = replace(copy(), node_id=NodeId("n1"), parts=parts)
    rig.others = (
        replace(node(copies=(has,)), node_id=NodeId("n1"), dataplane_host="10.0.0.2", dataplane_port=7001),
        replace(
            node(copies=(replace(has, parts=parts[:3]),)), node_id=NodeId("n2"), dataplane_host="10.0.0.3", dataplane_port=7002
        ),
        replace(node(copies=(has,)), node_id=NodeId("n3"), dataplane_host="10.0.0.4", dataplane_port=7003, draining=True),
    )
    await rig.report()
    orders: list[NodeHold | WorkerHold] = []

    async def heard(command: NodeHold | WorkerHold) -> None:
        orders.append(command)

    listening = [
        await rig.bus.subscribe("v1.loader.n0.hold", NodeHold, heard),
        await rig.bus.subscribe("v1.worker.w0.hold", WorkerHold, heard),
    ]
    await rig.demand()
    instance = await rig.shown_as(S.FETCHING)
    await rig.ordered(instance.instance_id)
    fetched = [one for one in orders if isinstance(one, NodeHold) and one.fetches]
    held = [one for one in orders if isinstance(one, WorkerHold) and one.holds]
    assert fetched[0].seq + 1 == held[0].seq, "bytes move while the worker gets ready: its node is told just before it"
    upstreams = fetched[0].fetches[0].upstreams
    assert upstreams == (
        Peer(node_id=NodeId("n1"), host="10.0.0.2", port=7001),
        Peer(node_id=NodeId("n2"), host="10.0.0.3", port=7002),
    )
    assert instance.placements[0].upstreams == ("n1",)
    (decision,) = await rig.rows(select(tables.decisions))
    assert [(chain["source"], chain["members"]) for chain in decision.outcome["chains"]] == [("n1", ["n0"])]
    assert "n0 takes the parts from n1, then n2, then file:///m" in decision.reasons

    await new_scheduler(rig.clock)
    epoch = rig.epoch
    for component in reversed(rig.application.components):
        await component.stop()
    for _ in range(4):
        await rig.later(0.5)
    await rig.until(lambda: rig.epoch > epoch)
    for one in listening:
        await one.end()
    told = {fetch.upstreams for command in orders if isinstance(command, NodeHold) for fetch in command.fetches}
    assert told == {upstreams}


async def test_a_leader_whose_lease_was_taken_writes_and_commands_no_more(rig: Rig) -> None:
    await rig.register(a_model(min_instances=1))
    ready = await rig.ready()
    in_half_a_second = func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, 0.5)
    async with rig.owner.unit_of_work() as work:
        stolen = update(tables.lease).values(holder="another", epoch=tables.lease.c.epoch + 1, expires_at=in_half_a_second)
        await work.connection.execute(stolen)
    rig.held.clear()
    rig.incarnation = "b"
    for _ in range(40):
        await rig.report()
        try:
            await rig.until(lambda: rig.instances(S.FAILED), 0.2)
        except TimeoutError:
            continue
        break
    (failed,) = rig.instances(S.FAILED)
    assert failed.instance_id == ready.instance_id
    assert failed.epoch >= ready.epoch + 2, "nothing was written until the lease was its own again"


async def test_without_a_database_nothing_is_started_and_nothing_is_lost(rig: Rig, module_database: URL) -> None:
    ready = await rig.ready()
    await rig.register(a_model(keep_alive_s=0.5), a_model("other"))
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    server = create_engine(module_database.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT")

    def allow(connections: bool) -> None:
        with server.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {module_database.database} ALLOW_CONNECTIONS {connections}"))
            gone = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")
            connection.execute(gone, {"name": module_database.database})

    allow(False)
    try:
        for _ in range(30):
            await rig.demand("other")
            await rig.later(0.5)
            if rig.application.ready() is not None:
                break
            with suppress(TimeoutError):
                await rig.until(lambda: rig.application.ready() is not None, 0.2)
        assert rig.application.ready() is not None
        assert [one.instance_id for one in rig.instances(*S)] == [ready.instance_id]
        assert rig.instances(S.READY)
    finally:
        allow(True)
        server.dispose()
    for _ in range(30):
        await rig.demand("other")
        await rig.later(0.3)
        with suppress(TimeoutError):
            await rig.until(lambda: rig.instances(S.FETCHING), 0.2)
            break
    assert [one.model for one in rig.instances(S.FETCHING)] == ["other"]
    assert [one.instance_id for one in rig.instances(S.READY)] == [ready.instance_id]


async def test_an_emptied_bucket_is_filled_after_a_reconnect(rig: Rig, reconnecting: ReconnectingBus) -> None:
    ready = await rig.ready()
    await (await rig.bus.bucket(INSTANCES)).delete(ready.instance_id)
    await rig.until(lambda: rig.shown[ready.instance_id] is None)
    await reconnecting.reconnect()
    assert (await rig.shown_as(S.READY)).instance_id == ready.instance_id


async def test_the_epoch_is_known_to_who_was_away_before_anything_is_commanded(rig: Rig, reconnecting: ReconnectingBus) -> None:
    bucket = await rig.bus.bucket(LEADER)
    assert rig.epoch > 0
    assert (await bucket.get(LEADING_KEY, Leading)).value == Leading(epoch=rig.epoch)
    await bucket.delete(LEADING_KEY)
    await reconnecting.reconnect()
    await until_says(bucket, rig.epoch)
    # Whatever the lease's row says, for example one from a backup: nobody would obey an epoch below this one.
    await bucket.put(LEADING_KEY, Leading(epoch=Epoch(50)))
    await reconnecting.reconnect()
    for _ in range(30):
        await rig.later(0.3)
        with suppress(TimeoutError):
            await rig.until(lambda: rig.epoch > 50, 0.2)
            break
    assert rig.epoch == 51
    await until_says(bucket, rig.epoch)


async def until_says(bucket: Bucket, epoch: Epoch) -> None:
    async def said() -> bool:
        return (await bucket.get(LEADING_KEY, Leading)).value == Leading(epoch=epoch)

    await until(said)


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
    await rig.until(lambda: rig.states[-2:] == [(ready.instance_id, S.LOADING), (ready.instance_id, S.READY)])
    await bucket.delete(ready.instance_id)
    await rig.until(lambda: rig.states[-2:] == [(ready.instance_id, None), (ready.instance_id, S.READY)])


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
    assert rig.reserved[-1].epoch > before, "it leads again under an epoch of its own, or not at all"


async def intend_drain(rig: Rig, *node_ids: str) -> None:
    """As the gateway writes it: the row, then the event."""
    async with rig.owner.unit_of_work() as work:
        await work.connection.execute(delete(tables.drains))
        for node_id in node_ids:
            values = {"node_id": node_id, "key_id": "k", "requested_at": func.now()}
            await work.connection.execute(insert(tables.drains).values(**values))
    event = Event(event_id=f"drain-{len(rig.events)}", kind="node_drained", entity="n0", at="")
    await rig.bus.publish("v1.event.gateway.node_drained", event)


async def test_a_node_that_drains_is_emptied_and_gets_nothing_until_it_is_used_again(
    rig: Rig, new_scheduler: Callable[[ManualClock], Awaitable[Application]]
) -> None:
    """The only node: there is no room elsewhere, so what runs there ends its requests and goes; a new leader keeps to it."""
    ready = await rig.ready()
    await rig.hold(ready.instance_id, H.READY, in_flight=1)
    await rig.later(1.1)
    await intend_drain(rig, "n0")
    drained = await rig.shown_as(S.DRAINING)
    assert drained.instance_id == ready.instance_id
    (decision,) = await rig.rows(select(tables.decisions).where(tables.decisions.c.kind == "drain"))
    assert "no room elsewhere" in decision.reasons[0]
    assert decision.inputs["instance"]["instance_id"] == ready.instance_id
    rig.held.clear()
    await rig.later(0.1)
    await rig.until(lambda: rig.shown[ready.instance_id] is None or not rig.instances(S.DRAINING))

    await rig.demand()

    async def refusals() -> list[Any]:
        refused = tables.decisions.c.outcome["refused"].astext == "no_room"
        return await rig.rows(select(tables.decisions).where(refused))

    for _ in range(30):
        await rig.demand()
        await rig.later(0.3)
        if await refusals():
            break
    assert any("its node is draining" in reason for reason in (await refusals())[0].reasons)
    assert len(rig.reserved) == 1, "room was asked for on a node that drains"

    for component in reversed(rig.application.components):
        await component.stop()
    rig.application = await new_scheduler(rig.clock)
    await rig.later(1.1)
    for _ in range(4):
        await rig.demand()
        await rig.later(0.3)
    assert len(rig.reserved) == 1, "a new leader forgot the drain"

    await intend_drain(rig)
    await rig.tried(2)
    assert (await rig.shown_as(S.FETCHING)).model == "m"
