"""Chains in commands: of rows and reports alone, and the same from one publication to the next."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, insert

from pilotlight.common.clock import SystemClock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.settings import DatabaseSettings
from pilotlight.policy.cluster import Copy, Liveness, NodeFacts, Tier
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.holds import upstreams_of
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Term
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.tick import tick
from pilotlight.policy.ids import Epoch, NodeId
from pilotlight.policy.instance import BRINGING
from pilotlight.policy.plan import Instance, InstanceState
from pilotlight.policy.testing import NOW_S, demand, instance, model, node
from pilotlight.scheduler.book import Book
from pilotlight.scheduler.chains import joined
from pilotlight.scheduler.lease import Fence
from pilotlight.scheduler.repository import SchedulerRepository

MODEL = model()
NAMES = ("a", "b", "c", "d", "e")
EVERY = tuple(range(6))


def facts(name: str, *, complete: bool = False, liveness: Liveness = Liveness.ALIVE) -> NodeFacts:
    held = Copy(
        digest=MODEL.digest, node_id=NodeId(name), tier=Tier.HOST, parts=EVERY, size_bytes=60
    )
    made = node(copies=(held,) if complete else (), liveness=liveness)
    return replace(made, node_id=NodeId(name), dataplane_host=f"host-{name}", dataplane_port=7000)


class Cluster:
    """Five nodes, and the rows of those that start the model."""

    def __init__(self) -> None:
        self.nodes = {NodeId(name): facts(name, complete=name == "a") for name in NAMES}
        self.entries: list[Record] = []

    def change(
        self, name: str, *, complete: bool = False, liveness: Liveness = Liveness.ALIVE
    ) -> None:
        self.nodes[NodeId(name)] = facts(name, complete=complete, liveness=liveness)

    def start(self, name: str) -> Instance:
        """What the planner does: the instance joins with its places, and is written with them."""
        one = instance(instance_id=f"i-{name}", worker_id=f"w-{name}", state=InstanceState.FETCHING)
        placed = replace(one.placements[0], node_id=NodeId(name))
        places = joined(MODEL, [placed], self.nodes.values(), self.entries)
        started = replace(one, placements=places.placements)
        self.entries.append(Record(instance=started, model=MODEL))
        return started

    def end(self, name: str, state: InstanceState) -> None:
        self.entries = [
            replace(one, instance=replace(one.instance, state=state))
            if one.instance.instance_id == f"i-{name}"
            else one
            for one in self.entries
        ]

    def told(self) -> dict[str, str]:
        found = upstreams_of(self.entries, self.nodes)
        return {str(node_id): " ".join(upstreams) for (node_id, _), upstreams in found.items()}


def test_those_that_start_one_after_the_other_are_one_chain_whatever_ends_or_dies() -> None:
    cluster = Cluster()
    for name in "bcd":
        before = cluster.told()
        cluster.start(name)
        assert before.items() <= cluster.told().items(), (
            "a node that joined before stays where it is"
        )
    assert cluster.told() == {"b": "a", "c": "b a", "d": "c b a"}
    cluster.change("c", liveness=Liveness.SUSPECT)
    assert cluster.told() == {"b": "a", "c": "b a", "d": "c b a"}
    cluster.change("c", liveness=Liveness.DEAD)
    cluster.end("c", InstanceState.FAILED)
    assert cluster.told() == {"b": "a", "d": "b a"}
    cluster.start("e")
    assert cluster.told() == {"b": "a", "d": "b a", "e": "d b a"}
    cluster.change("b", complete=True)
    assert cluster.told() == {"d": "b a", "e": "d b a"}, "what is there is not fetched"
    cluster.end("b", InstanceState.READY)
    assert cluster.told() == {"d": "b a", "e": "d b a"}
    cluster.change("c")
    cluster.start("c")
    assert cluster.told() == {"d": "b a", "e": "d b a", "c": "a b"}, (
        "the first source gives no node anything at this moment"
    )


def test_of_two_that_were_decided_together_the_one_that_is_a_row_first_goes_first() -> None:
    cluster, book = Cluster(), Book()
    cluster.change("a")
    decided = [instance(instance_id=f"i-{name}", worker_id=f"w-{name}") for name in "bc"]
    book.put(*(Record(instance=one, model=MODEL, tentative=True) for one in decided))
    for name in "cb":
        cluster.entries = list(book.books.of_digest(MODEL.digest))
        book.joined(Record(instance=cluster.start(name), model=MODEL))
        cluster.entries = list(book.books.of_digest(MODEL.digest))
    assert cluster.told() == {"c": "", "b": "c"}


def test_without_rows_that_start_there_is_nothing_to_plan() -> None:
    cluster = Cluster()
    cluster.start("b")
    for state in InstanceState:
        cluster.end("b", state)
        assert bool(cluster.told()) is (state in BRINGING)


def test_a_row_of_a_release_without_chains_gets_whoever_has_the_parts() -> None:
    cluster = Cluster()
    one = cluster.start("b")
    cluster.entries[0] = replace(
        cluster.entries[0],
        instance=replace(one, placements=(replace(one.placements[0], upstreams=()),)),
    )
    assert cluster.told() == {"b": "a"}


def test_a_change_of_upstreams_is_told_at_once_and_the_rest_by_the_second() -> None:
    cluster, memory = Cluster(), Memory()
    rules = ControlRules(reconcile=ReconcileRules(term_started_s=NOW_S, hold_deadline_s=10.0))
    term = Term(
        epoch=Epoch(1),
        started_s=NOW_S - 10,
        listening_since_s=NOW_S - 20,
        deaf=False,
        announced=True,
    )
    for name in "bc":
        cluster.start(name)

    def told(now_s: float) -> dict[str, list[str]]:
        nonlocal memory
        plan = tick(
            ControlFacts(
                now_s=now_s,
                term=term,
                books=Books().put(*cluster.entries),
                workers={},
                nodes=cluster.nodes,
                models={
                    MODEL.name: replace(MODEL, scaling=replace(MODEL.scaling, max_instances=4))
                },
                demand=(demand(MODEL.name, 1),),
            ),
            memory,
            rules,
        )
        memory = plan.memory
        return {
            str(one.node_id): list(one.fetches[0].upstreams)
            for one in (*plan.tell.nodes, *plan.repeat.nodes)
            if one.fetches
        }

    assert told(NOW_S) == {"b": ["a"], "c": ["b", "a"]}
    assert told(NOW_S + 0.25) == {}
    cluster.change("b", liveness=Liveness.DEAD)
    cluster.end("b", InstanceState.FAILED)
    assert told(NOW_S + 0.5) == {"c": ["a"]}
    assert told(NOW_S + 1.6) == {"c": ["a"]}


@pytest.mark.anyio
async def test_the_next_leader_reads_rows_in_the_order_in_which_they_were_planned(
    database_settings: Callable[[str], DatabaseSettings],
) -> None:
    database = Database(database_settings("scheduler"), "scheduler", SystemClock())
    await database.start()
    cluster, begun = Cluster(), datetime.now(UTC)
    for name in "dbc":
        cluster.start(name)
    told = cluster.told()
    rows = [
        {
            "instance_id": entry.instance.instance_id,
            "model": MODEL.name,
            "digest": MODEL.digest,
            "state": "fetching",
            "generation": 1,
            "epoch": 1,
            "body": to_row_json(replace(entry.instance, decision_id=f"dec-{index}")),
            "created_at": begun + timedelta(seconds=index),
            "updated_at": begun,
        }
        for index, entry in enumerate(cluster.entries)
    ]
    decided = {
        "kind": "cold_start",
        "model": MODEL.name,
        "epoch": 1,
        "at": begun,
        "outcome": {},
        "reasons": [],
    }
    async with database.unit_of_work() as work:
        # As a table is that was written to for a while: in no order.
        for index, row in reversed(list(enumerate(rows))):
            await work.connection.execute(insert(tables.instances).values(**row))
            inputs = {"models": [to_row_json(MODEL)]}
            await work.connection.execute(
                insert(tables.decisions).values(
                    decision_id=f"dec-{index}", inputs=inputs, **decided
                )
            )
    stored = await SchedulerRepository(
        database, Fence(database, "leader", Epoch(2)), SystemClock()
    ).load()
    cluster.entries = [Record(instance=one.instance, model=one.model) for one in stored.instances]
    assert [one.instance.instance_id for one in stored.instances] == ["i-d", "i-b", "i-c"]
    assert cluster.told() == told == {"d": "a", "b": "d a", "c": "b d a"}
    async with database.unit_of_work() as work:
        for table in (tables.instances, tables.decisions):
            await work.connection.execute(delete(table))
    await database.stop()
