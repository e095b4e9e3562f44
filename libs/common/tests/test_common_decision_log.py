"""What a decision log takes: of a tick what changed, however large the cluster is."""

import io
from dataclasses import replace

import msgspec
import pytest

from pilotlight.common.decision_log import FORMAT, Header, LogWriter, noted
from pilotlight.common.decision_rules import rules_change
from pilotlight.common.deltas import change_of, changed_by
from pilotlight.common.errors import InternalError
from pilotlight.policy.cluster import HeldStage, HeldState, WorkerView
from pilotlight.policy.coldstart.chosen import ChoiceRules
from pilotlight.policy.control.books import Record
from pilotlight.policy.control.focus import Focus
from pilotlight.policy.control.plan import ControlRules, StartOrder
from pilotlight.policy.control.testing import LargeCluster, Size
from pilotlight.policy.eviction.rivals.idle import TimeToLive
from pilotlight.policy.ids import DecisionId, Epoch, Generation, InstanceId, ModelName, WorkerId
from pilotlight.policy.plan import Instance, InstanceState

DAY_BYTES = 10**9
DECISIONS_PER_S = 10
BUDGET_BYTES = DAY_BYTES / (DECISIONS_PER_S * 86_400)
"""A cluster of 1,000 nodes writes less than a GB a day."""


class Story:
    """A cluster in which starts go all their way, and the log of it."""

    def __init__(self, nodes: int) -> None:
        size = Size(nodes=nodes, workers_per_node=8, models=nodes * 4, instances=nodes * 2)
        self.cluster = cluster = LargeCluster(size)
        scheme = replace(cluster.rules.scheme, choice=ChoiceRules())
        cluster.rules = replace(cluster.rules, scheme=scheme)
        cluster.memory = replace(cluster.memory, index=None)
        cluster.books = cluster.books.settled()
        header = Header(
            format=FORMAT,
            policy_version="x",
            epoch=1,
            started_at_s=0.0,
            rules=rules_change(cluster.rules),
        )
        self.log = LogWriter(io.BytesIO(), header)
        self.first = True
        self.tick(Focus())
        self.log.flush()

    def tick(self, changed: Focus) -> tuple[StartOrder, ...]:
        cluster = self.cluster
        facts, memory = cluster.facts(changed), cluster.memory
        plan = cluster.tick(changed)
        self.log.write(noted(facts, memory, plan, first=self.first))
        self.first = False
        cluster.carry_out(plan)
        return plan.start

    def start(self, number: int) -> None:
        """One decision, and all that is heard of its start until it serves."""
        cluster = self.cluster
        (order,) = self.tick(cluster.ask(number))
        assert order.choice.scheme is not None
        cluster.demand = ()
        place = order.choice.scheme.placements[0]
        now_s, key = cluster.now_s, InstanceId(f"inst-{number:024x}")
        instance = Instance(
            instance_id=key,
            model=order.model.name,
            digest=order.model.digest,
            state=InstanceState.FETCHING,
            generation=Generation(1),
            epoch=Epoch(1),
            placements=(place,),
            decision_id=DecisionId(f"dec-{number:024x}"),
            state_since_s=now_s,
            last_used_s=now_s,
            reason=order.reason,
        )
        cluster.books = cluster.books.put(Record(instance=instance, model=order.model))
        self.tick(Focus())
        for state in (HeldState.LOADING, HeldState.READY):
            held = HeldStage(
                instance_id=key,
                generation=Generation(1),
                model=order.model.name,
                digest=order.model.digest,
                stage=place.stage,
                state=state,
                device_bytes=place.device_bytes,
            )
            self._hear(place.worker_id, held)
            self.tick(Focus(workers=frozenset({place.worker_id})))
            for one in cluster.books.by_model.get(order.model.name, ()):
                record = cluster.books.records[one]
                reached = (
                    InstanceState.LOADING if state is HeldState.LOADING else InstanceState.READY
                )
                after = replace(record.instance, state=reached)
                cluster.books = cluster.books.put(replace(record, instance=after))

    def heartbeat(self, workers: int, turn: int) -> None:
        """Some workers report what they did before, later."""
        cluster = self.cluster
        names = sorted(cluster.workers)
        told = {names[(turn * workers + each) % len(names)] for each in range(workers)}
        for name in told:
            view: WorkerView = cluster.workers[name]
            cluster.workers[name] = replace(view, heard_s=cluster.now_s)
        self.tick(Focus(workers=frozenset(told)))

    def _hear(self, worker_id: WorkerId, stage: HeldStage) -> None:
        held = self.cluster.workers[worker_id].facts.held
        others = tuple(one for one in held if one.instance_id != stage.instance_id)
        self.cluster.hear(worker_id, *others, stage)


@pytest.mark.parametrize("nodes", [20, 80])
def test_a_decision_takes_less_than_its_share_of_a_day(nodes: int) -> None:
    """With the reports of its start, and its part of the heartbeats of 8,000 workers in 30 s."""
    story = Story(nodes)
    before = story.log.size_bytes
    starts = 40
    for number in range(starts):
        story.start(number)
        story.heartbeat(8000 // 30 // DECISIONS_PER_S, number)
    story.log.flush()
    assert (story.log.size_bytes - before) / starts < BUDGET_BYTES


def test_a_change_makes_the_one_of_the_other() -> None:
    """Of whole worlds, there and back, through msgpack; and equal ones need nothing."""
    cluster = LargeCluster(Size(nodes=3, workers_per_node=2, models=12, instances=6))
    before = cluster.facts(None)
    cluster.report(1)
    cluster.register(7)
    cluster.ask(2)
    cluster.workers = {k: v for k, v in cluster.workers.items() if k != "w0001-0"}
    after = cluster.facts(Focus(models=frozenset({"new-00007"})))
    before, after = (replace(one, books=before.books) for one in (before, after))
    change = msgspec.msgpack.decode(msgspec.msgpack.encode(change_of(before, after)))
    assert changed_by(before, change, type(before)) == after
    assert change_of(after, replace(after)) == [0]


@pytest.mark.parametrize(
    ("was", "now"), [("", "ab"), ("ab", "abc"), ("abc", "c"), ("ab", "cd"), ("ab", "")]
)
def test_of_a_set_of_names_it_is_written_who_came_and_who_went(was: str, now: str) -> None:
    facts = LargeCluster(Size(nodes=1, workers_per_node=1, models=2, instances=1)).facts(None)
    before, after = (replace(facts, asked=frozenset(map(ModelName, names))) for names in (was, now))
    change = msgspec.msgpack.decode(msgspec.msgpack.encode(change_of(before, after)))
    assert changed_by(before, change, type(before)) == after
    assert change_of(after, replace(after, asked=frozenset(after.asked))) == [0]


@pytest.mark.parametrize("change", [[9], [2, {99: [0]}], [3, 4], [1, "x"]])
def test_what_is_no_change_is_refused(change: list[object]) -> None:
    """Instead of a world that never was."""
    facts = LargeCluster(Size(nodes=1, workers_per_node=1, models=2, instances=1)).facts(None)
    with pytest.raises(InternalError, match="no change"):
        changed_by(facts, change, type(facts))


def test_a_log_names_the_policies_that_it_knows() -> None:
    """Figures of decisions that it could not read again are refused."""
    cluster = LargeCluster(Size(nodes=1, workers_per_node=1, models=2, instances=1))
    placement = replace(cluster.rules.scheme.placement, policy=TimeToLive())
    scheme = replace(cluster.rules.scheme, placement=placement)
    rules: ControlRules = replace(cluster.rules, scheme=scheme)
    with pytest.raises(InternalError, match="knows no ttl"):
        rules_change(rules)
