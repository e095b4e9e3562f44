"""Nodes over the admin API: listed with what is left on them, drained, used again."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, delete, func, insert, select
from sqlalchemy.pool import NullPool

from pilotlight.common.clock import ManualClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.messages.reports import (
    LoaderReport,
    WorkerReport,
    loader_report_subject,
    worker_report_subject,
)
from pilotlight.common.testing import DatabaseSettingsOf, MakeContext, until
from pilotlight.gateway.admin.drains import Drain, Left, NodeState, state_of
from pilotlight.gateway.admin.testing import (
    AdminWorld,
    admin_world,
    database_away,
    emptied,
    settings_in,
)
from pilotlight.gateway.admin.transfers import shown_transfers
from pilotlight.policy.cluster import (
    Copy,
    HeldStage,
    LinkSpeed,
    Liveness,
    OriginKind,
    OriginShare,
    Transfer,
)
from pilotlight.policy.ids import Digest, Epoch, ModelName, NodeId
from pilotlight.policy.plan import InstanceState
from pilotlight.policy.testing import copy, held, instance, node, worker

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(fresh_admin: AdminWorld) -> AsyncIterator[AdminWorld]:
    await fresh_admin.fleet.start()
    yield fresh_admin
    await fresh_admin.fleet.stop()


async def report(
    world: AdminWorld, *stages: HeldStage, copies: tuple[Copy, ...] = (), running: int = 0
) -> None:
    """Worker ``w0`` and the loader of ``n0`` say what they hold; returns when the gateway has
    heard.
    """
    facts = replace(worker(0, held_stages=stages), running_requests=running)
    at = {"incarnation": "a", "epoch_seen": Epoch(0)}
    await world.context.bus.publish(
        worker_report_subject(facts.worker_id), WorkerReport(facts=facts, **at)
    )
    await world.context.bus.publish(
        loader_report_subject(NodeId("n0")), LoaderReport(facts=node(copies=copies), **at)
    )
    await until(
        lambda: (
            [one.held for one in world.fleet.workers()] == [stages]
            and [one.running_requests for one in world.fleet.workers()] == [running]
            and [one.copies for one in world.fleet.nodes()] == [copies]
        )
    )


async def listed(world: AdminWorld) -> dict[str, Any]:
    answer = await world.http.get("/nodes")
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["nodes"]
    return one


async def test_a_node_is_drained_and_used_again(world: AdminWorld, module_database: URL) -> None:
    stage = held("m", "i")
    await report(world, stage, copies=(copy("m"),), running=2)
    before = await listed(world)
    assert (before["state"], before["drain"], before["workers"]) == ("ready", None, 1)
    assert before["left"] == {"instances": 1, "requests": 2, "copies": 1}
    assert before["pool_bytes"] == node().pool_bytes

    answer = await world.http.post("/nodes/n0/drain")
    assert answer.status_code == 202
    assert answer.json()["state"] == "draining"
    first = (await listed(world))["drain"]
    assert first["key_id"].startswith("key-")
    assert (await world.http.post("/nodes/n0/drain")).json()["drain"] == first, (
        "asked for again, it is as old as before"
    )

    # The scheduler's rows count too: an instance may be planned whose stage no report shows yet.
    engine = create_engine(module_database, poolclass=NullPool)
    row = {
        "model": "m",
        "digest": "d-m",
        "generation": 1,
        "epoch": 1,
        "created_at": func.now(),
        "updated_at": func.now(),
    }
    with engine.begin() as connection:
        connection.execute(delete(tables.instances))
        for name, state in (
            ("i", InstanceState.DRAINING),
            ("planned", InstanceState.FETCHING),
            ("over", InstanceState.GONE),
        ):
            body = to_row_json(instance(name=name, state=state))
            connection.execute(
                insert(tables.instances).values(
                    instance_id=name, state=state.value, body=body, **row
                )
            )
    assert (await listed(world))["left"]["instances"] == 2
    with engine.begin() as connection:
        connection.execute(delete(tables.instances))
    engine.dispose()

    await report(world)
    assert (await listed(world))["state"] == "drained"
    answer = await world.http.delete("/nodes/n0/drain")
    assert (answer.status_code, answer.json()["state"]) == (200, "ready")
    answer = await world.http.delete("/nodes/n0/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")
    async with world.database.reading() as connection:
        outbox = tables.outboxes["gateway"]
        events = (
            await connection.execute(select(outbox.c.kind, outbox.c.entity).order_by(outbox.c.id))
        ).all()
    assert [tuple(event) for event in events] == [
        ("node_drained", "n0"),
        ("node_drained", "n0"),
        ("node_undrained", "n0"),
    ]


async def test_a_node_whose_loader_is_silent_is_away(
    make_context: MakeContext,
    database_settings: DatabaseSettingsOf,
    module_database: URL,
    tmp_path: Path,
) -> None:
    emptied(module_database)
    clock = ManualClock()
    settings = settings_in(tmp_path, database_settings("gateway").database_url)
    async with admin_world(make_context("gateway", settings, clock=clock)) as world:
        await world.fleet.reports.hear_loader(
            LoaderReport(facts=node(), incarnation="a", epoch_seen=Epoch(0))
        )
        shown = await listed(world)
        assert (shown["state"], shown["liveness"]) == ("ready", "alive")
        clock.advance(3.1)
        world.fleet.reports.check()
        shown = await listed(world)
        assert (shown["state"], shown["liveness"]) == ("away", "dead")


async def test_a_node_that_is_not_known_is_refused_with_those_that_are(world: AdminWorld) -> None:
    await report(world)
    answer = await world.http.post("/nodes/n1/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")
    assert "n0" in answer.json()["error"]["message"]
    for wrong in ("-n", "n%00", "n" * 200):
        answer = await world.http.post(f"/nodes/{wrong}/drain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unprocessable"), wrong


async def test_a_drained_node_that_was_switched_off_is_still_listed(world: AdminWorld) -> None:
    async with world.database.unit_of_work() as work:
        values = {"node_id": "n9", "key_id": "", "requested_at": func.now()}
        await work.connection.execute(insert(tables.drains).values(**values))
    shown = await listed(world)
    assert (shown["node_id"], shown["state"], shown["workers"]) == ("n9", "drained", 0)
    assert (await world.http.post("/nodes/n9/drain")).status_code == 202
    assert (await world.http.delete("/nodes/n9/drain")).json()["state"] == "away"


async def test_without_a_database_nodes_are_shown_and_not_drained(
    world: AdminWorld, module_database: URL
) -> None:
    await report(world, held("m", "i"))
    await listed(world)
    with database_away(module_database):
        shown = await listed(world)
        assert (shown["state"], shown["left"]["instances"]) == ("unknown", 1)
        assert (await world.http.post("/nodes/n0/drain")).status_code == 503
    assert (await listed(world))["drain"] is None


def test_states() -> None:
    some, nothing = Left(instances=0, requests=0, copies=1), Left(instances=0, requests=0, copies=0)
    drain = Drain(node_id=NodeId("n0"), key_id="", requested_at=None)
    away = node(liveness=Liveness.DEAD)
    assert state_of(node(), None, some) is NodeState.READY
    assert state_of(None, None, nothing) is state_of(away, None, some) is NodeState.AWAY
    assert state_of(node(), drain, some) is NodeState.DRAINING
    assert state_of(node(), drain, nothing) is state_of(away, drain, nothing) is NodeState.DRAINED


async def test_transfers_of_every_node_that_reports_are_listed(world: AdminWorld) -> None:
    assert (await world.http.get("/transfers")).json() == {"transfers": [], "links": []}
    origin = OriginShare(kind=OriginKind.PEER, name="n1", size_bytes=20)
    moving = Transfer(
        digest=Digest("d-m"),
        source="file:///m",
        done_bytes=20,
        total_bytes=60,
        model=ModelName("m"),
        bytes_per_s=10.0,
        origins=(origin,),
    )
    # Counted with what pads its parts, more of it is there than it has; its speed is not known yet.
    older = Transfer(digest=Digest("d-old"), source="file:///old", done_bytes=70, total_bytes=60)
    link = LinkSpeed(kind=OriginKind.PEER, name="peer://n1", bytes_per_s=10.0)
    for name, transfers in (("n1", (older,)), ("n0", (moving,))):
        facts = replace(
            node(), node_id=NodeId(name), transfers=transfers, links=(link,) if name == "n0" else ()
        )
        message = LoaderReport(facts=facts, incarnation="a", epoch_seen=Epoch(0), dead_workers=())
        await world.context.bus.publish(loader_report_subject(NodeId(name)), message)
    await until(lambda: len(world.fleet.nodes()) == 2)
    found = (await world.http.get("/transfers")).json()
    first, second = found["transfers"]
    assert (first["node_id"], first["model"], first["left_s"], first["priority"]) == (
        "n0",
        "m",
        4.0,
        "cold_start",
    )
    assert first["origins"] == [{"kind": "peer", "name": "n1", "size_bytes": 20}]
    assert (second["node_id"], second["done_bytes"], second["left_s"]) == ("n1", 60, None)
    assert found["links"] == [
        {"node_id": "n0", "kind": "peer", "name": "peer://n1", "bytes_per_s": 10.0}
    ]
    listed = {one["node_id"]: one for one in (await world.http.get("/nodes")).json()["nodes"]}
    assert listed["n0"]["links"] == [{"kind": "peer", "name": "peer://n1", "bytes_per_s": 10.0}]
    assert listed["n0"]["transfers"][0]["origins"] == first["origins"]
    silent = [replace(one, liveness=Liveness.DEAD) for one in world.fleet.nodes()]
    assert shown_transfers(silent) == {"transfers": [], "links": []}, (
        "what a dead node does is not known"
    )
