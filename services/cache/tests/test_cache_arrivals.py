"""The cache hears of arrivals, reads estimates, and knows what an eviction costs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import URL, Engine, create_engine, delete, func, insert, select
from sqlalchemy.pool import NullPool

from pilotlight.cache.app import build
from pilotlight.cache.books import Books
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.testing import hear
from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import BusUnavailable, NoWorker
from pilotlight.common.messages.arrivals import Arrivals, arrivals_subject
from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.messages.room import (
    RESERVE_SUBJECT,
    Drop,
    Dropped,
    GivenUp,
    GiveUp,
    Reserve,
    Reserved,
    drop_subject,
    give_up_subject,
)
from pilotlight.common.service import Application
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.policy.arrivals import SLOT_S, Access, ArrivalCount, CounterLife
from pilotlight.policy.cluster import DeviceKind, HeldState
from pilotlight.policy.estimates import with_estimates
from pilotlight.policy.eviction.base import EvictionRules, RoomRequest, why_kept
from pilotlight.policy.eviction.candidates import registered
from pilotlight.policy.eviction.tiers import TierPolicies
from pilotlight.policy.ids import Digest, Epoch, GatewayId, InstanceId, ModelName
from pilotlight.policy.placement import PlacementRules, ServiceRules, evictable_bytes
from pilotlight.policy.plan import Estimate, Snapshot
from pilotlight.policy.testing import NOW_S, copy, held, instance, model, node, worker

GATEWAY = GatewayId("gw")


def told(age_s: float, **totals: int) -> Arrivals:
    counts = tuple(
        ArrivalCount(model=ModelName(name), total=total, idle_s=0.0)
        for name, total in totals.items()
    )
    return Arrivals(life=CounterLife(gateway_id=GATEWAY, number="1", age_s=age_s), counts=counts)


def learned(name: str, load_bytes_per_s: float) -> Estimate:
    return Estimate(
        model=ModelName(name),
        device_kind=DeviceKind.SIM,
        fetch_bytes_per_s=0.0,
        load_bytes_per_s=load_bytes_per_s,
        prefill_s=0.1,
        cold_ttft_s=1.0,
        samples=1,
    )


class Observing(TierPolicies):
    """Policies that remember what they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Access] = []

    def on_access(self, access: Access) -> None:
        self.seen.append(access)
        super().on_access(access)


def test_books_tell_the_policies_of_accesses() -> None:
    policies = Observing()
    books = Books(policies=policies)
    books.listen(NOW_S)
    message = told(0.0, m=2)
    told_of = [Access(model=ModelName("m"), count=2, at_s=NOW_S + 1)]
    assert list(books.hear_arrivals(message.life, message.counts, NOW_S + 1)) == told_of
    assert policies.seen == told_of
    assert books.hear_arrivals(message.life, message.counts, NOW_S + 2) == ()
    assert books.policies is policies
    assert policies.seen == told_of, "they are not told when nothing is new"


def test_candidates_have_the_penalty_of_estimates_and_the_rate_of_arrivals() -> None:
    books = Books(
        models=registered((model(),)), estimates=with_estimates({}, (learned("m", 100.0),))
    )
    books.listen(NOW_S)
    message = told(0.0, m=20)
    books.hear_arrivals(message.life, message.counts, NOW_S)
    facts = worker(held_stages=(held(),))
    hear(books, node(copies=(replace(copy(), parts=tuple(range(6))),)), NOW_S)
    (on_device,) = books.on_device(facts, NOW_S)
    assert (on_device.penalty_s, on_device.arrivals_per_s) == (0.6, 20 / SLOT_S)
    known = books.node(facts.node_id)
    assert known is not None
    (in_pool,) = books.in_pool(known, NOW_S)
    assert (in_pool.model, in_pool.penalty_s, in_pool.loss) == ("m", 0.6, pytest.approx(1.2))


def test_the_minimum_residency_begins_when_a_stage_can_be_used() -> None:
    books = Books()
    hear(books, worker(held_stages=(held(state=HeldState.LOADING),)), NOW_S)
    loaded = worker(held_stages=(held(),))
    hear(books, loaded, NOW_S + 9)
    hear(books, loaded, NOW_S + 11)
    (candidate,) = books.on_device(loaded, NOW_S + 11)
    assert candidate.resident_since_s == NOW_S + 9


STAGES = st.tuples(
    st.sampled_from(list(HeldState)),
    st.integers(0, 1),
    st.sampled_from(["m", "pinned"]),
    st.floats(0, 4),
    st.integers(1, 300),
)


@given(st.lists(STAGES, max_size=5), st.floats(0, 3))
def test_the_scheduler_counts_on_just_what_the_cache_may_evict(
    stages: list[tuple[HeldState, int, str, float, int]], min_residency_s: float
) -> None:
    models = (model(), model("pinned", pinned=True))
    rules = EvictionRules(min_residency_s=min_residency_s)
    books, held_stages, instances = Books(models=registered(models)), [], []
    for index, (state, in_flight, name, _, size) in enumerate(stages):
        held_stages.append(
            held(name, f"i{index}", device_bytes=size, state=state, in_flight=in_flight)
        )
    for since_s in sorted({each[3] for each in stages}):
        ready = [one for one, each in zip(held_stages, stages, strict=True) if each[3] <= since_s]
        hear(books, worker(held_stages=tuple(ready)), NOW_S + since_s)
    for one, (_, _, name, since_s, _) in zip(held_stages, stages, strict=True):
        instances.append(instance(name, one.instance_id, since_s=NOW_S + since_s))
    facts, now_s = worker(held_stages=tuple(held_stages)), NOW_S + 5
    request = RoomRequest(need_bytes=0, free_bytes=0, now_s=now_s)
    free_to_go = [
        one for one in books.on_device(facts, now_s) if why_kept(one, request, rules) is None
    ]
    snapshot = Snapshot(
        now_s=now_s, epoch=Epoch(1), models=models, workers=(facts,), instances=tuple(instances)
    )
    # What an instance is still owed is the scheduler's alone to know.
    placing = PlacementRules(eviction=rules, service=ServiceRules(min_loads=0.0))
    assert evictable_bytes(facts, snapshot, placing) == sum(one.size_bytes for one in free_to_go)


# On real servers.


@pytest.fixture
def settings(database_settings: DatabaseSettingsOf, tmp_path: Path) -> CacheSettings:
    url = database_settings("cache").database_url
    return CacheSettings(database_url=url, run_dir=tmp_path, min_residency_s=0.0)


@pytest.fixture
def owner(module_database: URL):
    """The database as others have written it: a model, and an estimate of it."""
    engine = create_engine(module_database, poolclass=NullPool)
    row = {
        "name": "m",
        "digest": "d-m",
        "body": to_row_json(model()),
        "created_at": func.now(),
        "updated_at": func.now(),
    }
    estimate = {"model": "m", "device_kind": "sim", "body": to_row_json(learned("m", 100.0))}
    with engine.begin() as connection:
        connection.execute(insert(tables.models).values(**row))
        connection.execute(insert(tables.estimates).values(**estimate))
    yield engine
    with engine.begin() as connection:
        for table in (tables.models, tables.estimates, tables.grants, tables.evictions):
            connection.execute(delete(table))
    engine.dispose()


async def give_all(request: GiveUp) -> GivenUp:
    return GivenUp(instance_ids=request.instance_ids)


async def drop_all(request: Drop) -> Dropped:
    return Dropped(digests=request.digests)


@pytest.mark.anyio
@pytest.mark.slow
async def test_an_eviction_is_recorded_with_its_loss(
    settings: CacheSettings, make_context: MakeContext, bus: Bus, owner: Engine
) -> None:
    context = make_context("cache", settings)
    application: Application = await build(context)
    for component in application.components:
        await component.start()

    def figure(name: str) -> float | None:
        return context.metrics.get_sample_value(f"pilotlight_cache_{name}")

    await bus.publish(arrivals_subject(GATEWAY), told(0.0, m=30, other=1))
    await bus.publish(arrivals_subject(GATEWAY), told(0.1, m=50))
    await until(lambda: figure("arrivals_total") == 51)
    assert (figure("arrival_gateways"), figure("arrival_models")) == (1, 2)

    facts = worker(memory_bytes=150, held_stages=(held(),))
    pool = node(copies=(replace(copy(), parts=tuple(range(6))),))
    await bus.serve(give_up_subject(facts.worker_id), GiveUp, give_all)
    await bus.serve(drop_subject(pool.node_id), Drop, drop_all)
    wanted = Reserve(
        instance_id=InstanceId("next"),
        model=ModelName("next"),
        digest=Digest("d-next"),
        worker_id=facts.worker_id,
        node_id=pool.node_id,
        device_bytes=100,
        host_part_bytes=(1,),
        lease_s=30.0,
    )

    async def granted() -> bool:
        report = WorkerReport(facts=facts, incarnation="i", epoch_seen=Epoch(1))
        await bus.publish(worker_report_subject(facts.worker_id), report)
        await bus.publish(
            loader_report_subject(pool.node_id),
            LoaderReport(facts=pool, incarnation="i", epoch_seen=Epoch(1)),
        )
        try:
            return bool(await bus.request(RESERVE_SUBJECT, wanted, Reserved, deadline_s=5.0))
        except (BusUnavailable, NoWorker):
            return False

    await until(granted)
    with owner.connect() as connection:
        (row,) = connection.execute(select(tables.evictions)).all()
    assert (row.kind, row.subject, row.inputs["model"], row.inputs["for_model"]) == (
        "instance",
        "i",
        "m",
        "next",
    )
    assert (row.inputs["penalty_s"], row.inputs["size_bytes"]) == (0.6, 100)
    assert row.inputs["arrivals_per_s"] > 0
    assert row.inputs["loss"] == row.inputs["penalty_s"] * row.inputs["arrivals_per_s"]
    for component in reversed(application.components):
        await component.stop()
