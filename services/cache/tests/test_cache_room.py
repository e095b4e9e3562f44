"""Making room, against real NATS and PostgreSQL, with a worker and a loader played by the test."""

from dataclasses import replace

import pytest
from sqlalchemy import URL, create_engine, delete, func, insert, select, update
from sqlalchemy.pool import NullPool

from pilotlight.cache.app import build
from pilotlight.cache.settings import CacheSettings
from pilotlight.cache.testing import (
    DEADLINE_S,
    MEMORY,
    NODE,
    Peers,
    answers,
    change,
    heard,
    reserve,
    stage,
    start,
    stop,
)
from pilotlight.common.bus import Bus
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.errors import HostPoolFull, NoRoom, NoWorker
from pilotlight.common.messages.events import Event, event_subject
from pilotlight.common.messages.room import RELEASE_SUBJECT, Release, Released
from pilotlight.common.service import Application
from pilotlight.common.testing import MakeContext, until
from pilotlight.policy.eviction.thrash import ThrashRules
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.testing import copy, model, node

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_grants_room_once_for_each_stage(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers)
    first = await reserve(bus, "a", 600)
    assert (await reserve(bus, "a", 600)).grant_id == first.grant_id
    with pytest.raises(NoRoom):
        await reserve(bus, "b", 600)
    await bus.request(
        RELEASE_SUBJECT, Release(grant_id=first.grant_id), Released, deadline_s=DEADLINE_S
    )
    assert (await reserve(bus, "b", 600)).grant_id != first.grant_id


async def test_a_grant_grows_with_the_generation_of_its_stage(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    """What it has counts for what it asks; what others have goes for the rest alone."""
    idle = replace(stage("idle", 300), idle_s=60.0)
    await heard(bus, peers, idle)
    first = await reserve(bus, "a", 400)
    await heard(bus, peers, idle, replace(stage("a", 400), in_flight=1))
    assert (await reserve(bus, "a", 600)).grant_id == first.grant_id, (
        "the same generation is the same grant"
    )
    grown = await reserve(bus, "a", 600, generation=2)
    assert grown.grant_id != first.grant_id
    assert grown.evicted_instances == ()
    assert (await reserve(bus, "a", 600, generation=2)).grant_id == grown.grant_id
    with pytest.raises(NoRoom):
        await reserve(bus, "b", 900)
    larger = await reserve(bus, "a", 900, generation=3)
    assert larger.evicted_instances == (InstanceId("idle"),)
    await bus.request(RELEASE_SUBJECT, Release(grant_id=first.grant_id), Released, deadline_s=2.0)
    with pytest.raises(NoRoom):
        await reserve(bus, "b", 101)
    assert await reserve(bus, "b", 100)


async def test_evicts_the_idle_and_spares_the_busy(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    old, young = replace(stage("old", 500), idle_s=60.0), replace(stage("young", 500), idle_s=1.0)
    await heard(bus, peers, old, young)
    granted = await reserve(bus, "new", 400)
    assert granted.evicted_instances == (InstanceId("old"),)
    assert [one.instance_id for one in peers.facts.held] == ["young"]


async def test_what_is_owed_service_stays(cache: Application, bus: Bus, peers: Peers) -> None:
    old, young = replace(stage("old", 500), idle_s=60.0), replace(stage("young", 500), idle_s=1.0)
    await heard(bus, peers, old, young)
    granted = await reserve(bus, "new", 400, protected=("old",))
    assert granted.evicted_instances == (InstanceId("young"),)
    with pytest.raises(NoRoom):
        await reserve(bus, "next", 500, protected=("old",))


async def test_for_a_start_that_nobody_waits_for_nothing_goes(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    full = replace(node(copies=(replace(copy("x", size_bytes=800), idle_s=60.0),)))
    full = replace(full, pool_bytes=MEMORY, pool_free_bytes=MEMORY - 800)
    await heard(bus, peers, replace(stage("old", 500), idle_s=60.0), where=full)
    with pytest.raises(NoRoom):
        await reserve(bus, "ahead", 600, free_room=True)
    with pytest.raises(HostPoolFull):
        await reserve(bus, "ahead", 500, host=300, free_room=True)
    assert not peers.given_up
    assert not any(one.digests for one in peers.dropped)
    assert await reserve(bus, "ahead", 500, host=200, free_room=True)
    asked_for = await reserve(bus, "waited-for", 500, host=300)
    assert asked_for.evicted_instances == (InstanceId("old"),)
    assert asked_for.dropped_copies == (Digest("d-x"),)


async def test_evicts_no_more_than_is_needed(cache: Application, bus: Bus, peers: Peers) -> None:
    """The victims' own grants are still open: their scheduler has not heard of their end."""
    await heard(bus, peers)
    for name in ("a", "b", "c"):
        await reserve(bus, name, 300)
    idle = [
        replace(stage(name, 300), idle_s=60.0 - age) for age, name in enumerate(("a", "b", "c"))
    ]
    await heard(bus, peers, *idle)
    granted = await reserve(bus, "new", 400)
    assert granted.evicted_instances == (InstanceId("a"),)
    assert [one.instance_id for one in peers.facts.held] == ["b", "c"]


async def test_a_refused_victim_is_replanned_and_in_the_end_there_is_no_room(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    peers.busy = {"a"}
    await heard(bus, peers, replace(stage("a", 900), idle_s=60.0))
    with pytest.raises(NoRoom):
        await reserve(bus, "new", 400)
    assert [one.instance_id for one in peers.facts.held] == ["a"]


async def test_all_pinned_and_full_names_what_to_unpin(
    settings: CacheSettings,
    make_context: MakeContext,
    bus: Bus,
    peers: Peers,
    module_database: URL,
) -> None:
    for one in (model("large", pinned=True), model("small", pinned=True)):
        row = {"name": one.name, "digest": one.digest, "body": to_row_json(one)}
        times = {"created_at": func.now(), "updated_at": func.now()}
        change(module_database, insert(tables.models).values(**row, **times))
    application = await build(make_context("cache", settings))
    await start(application)
    try:
        await until(lambda: answers(bus))
        await heard(bus, peers, stage("large", 600), stage("small", 400))
        with pytest.raises(NoRoom, match="unpin large to make it"):
            await reserve(bus, "new", 500)
        with pytest.raises(NoRoom, match="unpin large, small to make it"):
            await reserve(bus, "new", 700)
        assert peers.given_up == []
    finally:
        await stop(application)
        change(module_database, delete(tables.models))


async def test_a_pin_counts_from_its_answer_on(
    cache: Application, bus: Bus, peers: Peers, module_database: URL
) -> None:
    """The cache lists models each second; what was pinned since then stays all the same, on a
    device and in a host pool, and what was unpinned since then may go.
    """
    loose = model("kept")
    times = {"created_at": func.now(), "updated_at": func.now()}
    row = {"name": loose.name, "digest": loose.digest, "body": to_row_json(loose)}
    change(module_database, insert(tables.models).values(**row, **times))
    by_name = tables.models.c.name == loose.name

    def pin(pinned: bool) -> None:
        body = to_row_json(replace(loose, pinned=pinned))
        change(module_database, update(tables.models).where(by_name).values(body=body))

    try:
        idle = replace(stage("kept", 600), idle_s=60.0)
        await heard(
            bus, peers, idle, where=node(pool_bytes=MEMORY, copies=(copy("kept", size_bytes=600),))
        )
        pin(True)
        with pytest.raises(NoRoom, match="unpin kept"):
            await reserve(bus, "new", 500)
        pin(False)
        pin(True)
        with pytest.raises(HostPoolFull, match="unpin kept"):
            await reserve(bus, "new", 100, host=500)
        assert (peers.given_up, peers.dropped) == ([], [])
        pin(False)
        assert (await reserve(bus, "new", 500)).evicted_instances == ("kept",)
    finally:
        change(module_database, delete(tables.models))


async def test_models_that_are_loaded_again_and_again_become_an_event_with_advice(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    told: list[Event] = []

    async def hear(event: Event) -> None:
        told.append(event)

    await bus.subscribe(event_subject("cache", "thrash"), Event, hear)
    idle = replace(stage("again", 900), idle_s=60.0)
    await heard(bus, peers, idle)
    for _ in range(ThrashRules().reloads):
        assert told == []
        granted = await reserve(bus, "other", 500)
        assert granted.evicted_instances == ("again",)
        await bus.request(
            RELEASE_SUBJECT, Release(grant_id=granted.grant_id), Released, deadline_s=DEADLINE_S
        )
        await heard(bus, peers)
        await heard(bus, peers, idle)
    await until(lambda: told)
    assert [(one.entity, one.data["models"]) for one in told] == [("again", ["again"])]
    assert "a pin on those that must not wait" in told[0].data["advice"]


async def test_drops_copies_from_the_host_pool(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers, where=node(pool_bytes=MEMORY, copies=(copy("x", size_bytes=800),)))
    granted = await reserve(bus, "new", 100, host=700)
    assert granted.dropped_copies == (Digest("d-x"),)


async def test_frees_more_where_free_bytes_do_not_lie_in_a_row(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    """400 bytes are free, but no 300 of them in a row: the least recently used copy goes, then the
    next, until the parts fit.
    """
    await heard(bus, peers, where=peers.lay_out(("", 200), ("b", 290), ("", 200), ("a", 310)))
    granted = await reserve(bus, "new", 100, parts=(100, 300))
    assert granted.dropped_copies == ("d-a",)
    assert [drop.digests for drop in peers.dropped] == [(), ("d-a",)]
    assert [drop.wanted and drop.wanted.part_bytes for drop in peers.dropped] == [(100, 300)] * 2


async def test_goes_on_until_the_parts_fit(cache: Application, bus: Bus, peers: Peers) -> None:
    """Room is made by worth, not by place: what went first was between copies that stay."""
    ranges = (("e", 200), ("a", 110), ("d", 190), ("b", 105), ("c", 195), ("", 200))
    facts = peers.lay_out(*ranges)
    idle_s = {"d-a": 90.0, "d-b": 80.0, "d-c": 70.0, "d-d": 60.0, "d-e": 50.0}
    await heard(
        bus,
        peers,
        where=replace(
            facts, copies=tuple(replace(one, idle_s=idle_s[one.digest]) for one in facts.copies)
        ),
    )
    granted = await reserve(bus, "new", 100, parts=(300,))
    assert granted.dropped_copies == ("d-a", "d-b", "d-c")
    assert [drop.digests for drop in peers.dropped] == [("d-a",), ("d-b", "d-c")]


async def test_asks_the_loader_for_nothing_where_free_bytes_lie_in_a_row(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    await heard(bus, peers, where=peers.lay_out(("", 100), ("a", 300), ("", 600)))
    assert (await reserve(bus, "new", 100, parts=(300, 300))).dropped_copies == ()
    assert peers.dropped == []
    # Those 600 are promised now; the 100 that are left lie in a row as far as the loader can tell,
    # and it is asked.
    assert (await reserve(bus, "small", 100, parts=(100,))).dropped_copies == ()
    assert [drop.digests for drop in peers.dropped] == [()]


async def test_copies_in_use_may_keep_free_bytes_apart(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    facts = peers.lay_out(("", 300), ("a", 100), ("", 300), ("b", 100), ("", 200))
    await heard(
        bus,
        peers,
        where=replace(facts, copies=tuple(replace(one, leases=1) for one in facts.copies)),
    )
    with pytest.raises(HostPoolFull, match="in a row") as caught:
        await reserve(bus, "new", 100, parts=(400,))
    assert caught.value.retry_after_s
    assert [drop.digests for drop in peers.dropped] == [()]
    assert (await reserve(bus, "new", 100, parts=(300, 300))).dropped_copies == ()


async def test_a_scheduler_of_the_release_before_gets_its_grant(
    cache: Application, bus: Bus, peers: Peers
) -> None:
    """It does not say which parts it wants; whether they fit is seen when they are fetched."""
    await heard(bus, peers, where=peers.lay_out(("", 200), ("b", 290), ("", 200), ("a", 310)))
    assert (await reserve(bus, "new", 100, host=300)).dropped_copies == ()


async def test_says_when_a_model_can_never_fit(cache: Application, bus: Bus, peers: Peers) -> None:
    await heard(bus, peers)
    with pytest.raises(NoWorker):
        await reserve(bus, "huge", MEMORY + 1)
    with pytest.raises(HostPoolFull):
        await reserve(bus, "huge", 1, host=MEMORY + 1)


async def test_a_node_that_drains_gets_no_grant_and_its_copies_are_struck(
    cache: Application, bus: Bus, peers: Peers, module_database: URL
) -> None:
    """A copy goes when no lease reads it and no instance there has a grant for it; afterwards the
    node is granted room again.
    """

    def struck() -> set[str]:
        engine = create_engine(module_database, poolclass=NullPool)
        of_node = select(tables.evictions.c.subject).where(
            tables.evictions.c.reason == "its node is being drained"
        )
        with engine.connect() as connection:
            found = set(connection.execute(of_node).scalars())
        engine.dispose()
        return found

    copies = (
        copy("idle", size_bytes=10),
        replace(copy("read", size_bytes=10), leases=1),
        copy("used", size_bytes=10),
    )
    await heard(bus, peers, where=node(pool_bytes=MEMORY, copies=copies))
    granted = await reserve(bus, "used", 100)
    change(
        module_database,
        insert(tables.drains).values(node_id=NODE, key_id="", requested_at=func.now()),
    )
    try:
        await until(lambda: [one.digest for one in peers.node.copies] == ["d-read", "d-used"])
        with pytest.raises(NoRoom, match="is being drained"):
            await reserve(bus, "new", 1)
        assert (await reserve(bus, "used", 100)).grant_id == granted.grant_id
        await bus.request(
            RELEASE_SUBJECT, Release(grant_id=granted.grant_id), Released, deadline_s=DEADLINE_S
        )
        await until(lambda: [one.digest for one in peers.node.copies] == ["d-read"])
        await until(lambda: struck() == {"d-idle", "d-used"})
    finally:
        change(module_database, delete(tables.drains))

    async def granted_again() -> bool:
        await peers.report()
        try:
            await reserve(bus, "new", 1)
        except NoRoom:
            return False
        return True

    await until(granted_again)
