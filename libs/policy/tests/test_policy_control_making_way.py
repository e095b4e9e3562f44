"""Busy workers are ranked without a look at all of them, and the same instances make way."""

import random
from dataclasses import replace

import pytest
from cluster_story import START_S, Cluster

from pilotlight.policy.cluster import DeviceHealth, HeldStage
from pilotlight.policy.control.books import Books, Record
from pilotlight.policy.control.draft import Draft
from pilotlight.policy.control.index import Index
from pilotlight.policy.control.plan import ControlRules
from pilotlight.policy.control.reconcile import ReconcileRules
from pilotlight.policy.control.shortlist import for_turns
from pilotlight.policy.drain import staying
from pilotlight.policy.ids import InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.plan import InstanceState, NodeDrain, Placement
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import held, instance, model
from pilotlight.policy.turns import TurnPlan, TurnRules, plan_turns

RULES = ControlRules(reconcile=ReconcileRules(term_started_s=START_S - 400, hold_deadline_s=3.0))
NODES, WORKERS = 6, 60
SERVED = [ModelName(f"served{each:02}") for each in range(120)]
COLD = [ModelName(f"cold{each}") for each in range(6)]


def jammed(seed: int) -> Cluster:
    """Workers without much room, of instances that are mostly busy; some models are served in
    several places, some across workers.
    """
    rng = random.Random(seed)
    cluster = Cluster.of(seed)
    cluster.workers.clear()
    cluster.models = {
        name: replace(
            model(name, part_bytes=rng.choice((5, 10, 20))),
            pinned=rng.random() < 0.1,
            scaling=replace(
                model().scaling, min_instances=rng.choice((0, 0, 0, 1)), max_instances=9
            ),
        )
        for name in (*SERVED, *COLD)
    }
    for index in range(NODES):
        cluster.report_node(NodeId(f"n{index}"))
        node = cluster.nodes[NodeId(f"n{index}")]
        cluster.nodes[node.node_id] = replace(
            node, transfers=(), nic_bytes_per_s=100.0, pool_bytes=rng.choice((300, 10_000))
        )
    ids = [WorkerId(f"w{index % NODES}{index:02}") for index in range(WORKERS)]
    stages: dict[WorkerId, list[HeldStage]] = {worker_id: [] for worker_id in ids}
    names, spread, draining = (
        rng.sample(SERVED, k=rng.choice((6, 30, 120))),
        rng.choice((0.0, 0.02, 0.2)),
        rng.choice((0.0, 0.05)),
    )
    for index in range(rng.choice((WORKERS, 2 * WORKERS))):
        name, key = rng.choice(names), f"i{index:03}"
        state = InstanceState.DRAINING if rng.random() < draining else InstanceState.READY
        busy, on = int(rng.random() < 0.8), rng.sample(ids, k=2 if rng.random() < spread else 1)
        # What is idle or goes is small, so that there is rarely room without a victim.
        size = rng.choice(
            (100, 180, 300, 400) if busy and state is InstanceState.READY else (50, 100)
        )
        one = instance(
            name,
            key,
            state=state,
            since_s=START_S - rng.randrange(100),
            in_flight=busy,
            device_bytes=size,
        )
        places = tuple(
            Placement(
                worker_id=each,
                node_id=NodeId(f"n{each[1]}"),
                stage=one.placements[0].stage,
                device_bytes=size,
            )
            for each in on
        )
        one = replace(
            one,
            placements=places,
            load_s=rng.choice((0.0, 0.0, 5.0, 30.0)),
            digest=cluster.models[name].digest,
        )
        one = replace(one, last_used_s=rng.choice((one.last_used_s, START_S)))
        cluster.books = cluster.books.put(Record(instance=one, model=cluster.models[name]))
        for each in on:
            stages[each].append(held(name, key, device_bytes=size, in_flight=busy))
    for worker_id in ids:
        cluster.report_worker(worker_id, tuple(stages[worker_id]))
        view = cluster.workers[worker_id]
        memory_bytes = sum(one.device_bytes for one in stages[worker_id]) + rng.choice(
            (0, 0, 0, 20, 60)
        )
        device = replace(
            view.facts.device, memory_bytes=memory_bytes, load_bytes_per_s=100.0, granule_bytes=1
        )
        facts = replace(view.facts, device=device, engine_up=True, health=DeviceHealth())
        cluster.workers[worker_id] = replace(view, facts=facts)
    if rng.random() < 0.2:
        cluster.drained_s[NodeId("n1")] = START_S
    return cluster


def planned(seed: int, asking: int, rules: TurnRules) -> tuple[TurnPlan, TurnPlan, int, int]:
    """What a look at the shortlist says, what one at everything says; how many workers could make
    way, how many are listed.
    """
    cluster = jammed(seed)
    rng = random.Random(seed + 1)
    names = rng.sample(COLD, k=asking)
    ages_s = [rng.choice((1.0, 5.0, 9.0)) if each else 9.0 for each in range(asking)]
    demand = tuple(
        Demand(model=name, waiting=1, oldest_age_s=age_s, deadline_in_s=9.0)
        for name, age_s in zip(names, ages_s, strict=True)
    )
    drains = tuple(NodeDrain(node_id=node_id, age_s=0.0) for node_id in cluster.drained_s)
    facts = replace(cluster.facts(), drains=drains)
    draft = Draft(cluster.books, facts, Index(), RULES)
    draft.hear(set(cluster.workers), set(cluster.nodes), set())
    workers = for_turns(names, demand, draft, rules)
    part = plan_turns(staying(draft.slice(cluster.models, workers, demand=demand)), names, rules)
    whole = plan_turns(
        staying(draft.slice(cluster.models, cluster.workers, demand=demand)), names, rules
    )
    return part, whole, len(draft.rooms.busy), len(workers)


@pytest.mark.slow
@pytest.mark.parametrize(("asking", "line_limit"), [(1, 64), (2, 64), (3, 64), (6, 64), (6, 2)])
def test_the_same_instances_make_way(asking: int, line_limit: int) -> None:
    drains = fewer = 0
    for seed in range(60):
        part, whole, busy, listed = planned(seed, asking, TurnRules(line_limit=line_limit))
        assert part == whole, f"seed {seed}"
        drains += bool(whole.drains)
        fewer += listed < busy // 2
    assert drains >= 20, "in many of the stories somebody has to make way"
    assert asking > 1 or fewer >= 20, "and not all busy workers are compared for that"


def busy_workers(*stages: tuple[tuple[str, int, float, bool], ...]) -> Cluster:
    """Full workers ``w000`` and so on, with instances of models: bytes, how long they have served,
    whether they are busy.
    """
    cluster = Cluster.of(0)
    cluster.workers.clear()
    cluster.books = Books()
    for at, here in enumerate(stages):
        worker_id, shown = WorkerId(f"w0{at:02}"), list[HeldStage]()
        for name, size, served_s, busy in here:
            key = f"{name}-{at:02}"
            cluster.models.setdefault(ModelName(name), model(name))
            one = instance(
                name,
                key,
                worker_id=worker_id,
                since_s=START_S - served_s,
                used_s=START_S,
                in_flight=int(busy),
                device_bytes=size,
            )
            one = replace(one, load_s=3.0)
            cluster.books = cluster.books.put(
                Record(instance=one, model=cluster.models[ModelName(name)])
            )
            shown.append(held(name, key, device_bytes=size, in_flight=int(busy)))
        cluster.report_worker(worker_id, tuple(shown))
        view = cluster.workers[worker_id]
        device = replace(
            view.facts.device, memory_bytes=sum(one.device_bytes for one in shown), granule_bytes=1
        )
        facts = replace(view.facts, device=device, engine_up=True, health=DeviceHealth())
        cluster.workers[worker_id] = replace(view, facts=facts)
    return cluster


def drained(cluster: Cluster, *asking: ModelName) -> list[str]:
    """Instances that make way for models that have waited for long, by the shortlist, and, as is
    asserted, by all workers.
    """
    for name in asking:
        cluster.models[name] = model(name, part_bytes=15)
    demand = tuple(
        Demand(model=name, waiting=1, oldest_age_s=9.0, deadline_in_s=9.0) for name in asking
    )
    draft = Draft(cluster.books, cluster.facts(), Index(), RULES)
    draft.hear(set(cluster.workers), set(cluster.nodes), set())
    workers = for_turns(asking, demand, draft, TurnRules())
    part, whole = (
        plan_turns(draft.slice(cluster.models, each, demand=demand), asking, TurnRules())
        for each in (workers, cluster.workers)
    )
    assert part == whole
    return [one.instance_id for one in whole.drains]


def test_what_settles_in_is_not_counted_on_when_workers_are_ranked() -> None:
    settling = (("idle", 100, 1.0, False), ("old", 300, 50.0, True))
    assert drained(busy_workers(*[settling] * 5, (("young", 400, 10.0, True),)), COLD[0]) == [
        "young-05"
    ]


def test_models_with_instances_elsewhere_are_ranked_anew_when_one_makes_way() -> None:
    """Of four instances two may go: the first takes one, the others are worth more then than one of
    a model served twice.
    """
    two = [(("two", 400, 10.0, True),)] * 2
    cluster = busy_workers(*[(("four", 400, 50.0, True),)] * 4, *two)
    four = ModelName("four")
    cluster.models[four] = replace(
        cluster.models[four], scaling=replace(model().scaling, min_instances=2)
    )
    assert drained(cluster, *COLD[:2]) == ["four-00", "two-04"]


def test_what_leaves_with_a_victim_that_spans_workers_is_compared_with_both() -> None:
    """The first drains on ``w000`` already. There, ``two`` makes way for one model; it also had
    half of ``w001``, whose other half is the cheapest place for the next model.
    """
    others = [((f"other{at}", 400, 50.0 + at / 10, True),) for at in range(6)]
    left = (("first", 200, 1.0, True), ("two", 200, 100.0, True))
    cluster = busy_workers(left, (("two", 200, 100.0, True), ("half", 200, 90.0, True)), *others)
    here, there = WorkerId("w000"), WorkerId("w001")
    first, two = (cluster.books.records[InstanceId(f"{name}-00")] for name in ("first", "two"))
    drains = replace(first.instance, state=InstanceState.DRAINING, drain_within_s=10.0)
    spans = replace(
        two.instance,
        placements=tuple(
            replace(two.instance.placements[0], worker_id=worker_id) for worker_id in (here, there)
        ),
    )
    cluster.books = (
        cluster.books.without([InstanceId("two-01")])
        .put(replace(first, instance=drains))
        .put(replace(two, instance=spans))
    )
    view = cluster.workers[there]
    shown = tuple(
        replace(one, instance_id=spans.instance_id) if one.instance_id == "two-01" else one
        for one in view.facts.held
    )
    cluster.workers[there] = replace(view, facts=replace(view.facts, held=shown))
    assert drained(cluster, *COLD[:2]) == ["two-00", "half-01"]


def test_of_many_busy_workers_few_are_compared() -> None:
    cluster = busy_workers(*[((f"served{at:02}", 400, 50.0 + at, True),) for at in range(90)])
    cluster.models[COLD[0]] = model(COLD[0], part_bytes=15)
    demand = (Demand(model=COLD[0], waiting=1, oldest_age_s=9.0, deadline_in_s=9.0),)
    draft = Draft(cluster.books, cluster.facts(), Index(), RULES)
    draft.hear(set(cluster.workers), set(cluster.nodes), set())
    assert for_turns(COLD[:1], demand, draft, TurnRules()) == {"w089", "w088"}, (
        "the one that has served for the longest, and a next"
    )
