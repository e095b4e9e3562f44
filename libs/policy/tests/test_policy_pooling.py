"""Models that make vectors or scores: their task, and how many workers a start of one gets."""

from dataclasses import replace

import pytest

from pilotlight.policy.coldstart.chosen import ChoiceRules, KnownStarts
from pilotlight.policy.coldstart.contention import FetchBooks
from pilotlight.policy.coldstart.facts import link_capacities
from pilotlight.policy.coldstart.servers import StartRules
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Slo
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.plan import Snapshot
from pilotlight.policy.pooling import Pooling, PoolingMode, Task
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import NOW_S, Epoch, model, node, worker

RULES = SchemeRules(choice=ChoiceRules(start=StartRules(max_stages=2, max_steps=2000)))


@pytest.mark.parametrize(
    ("pooling", "task", "stages"),
    [
        (None, Task.GENERATE, 2),
        (Pooling(mode=PoolingMode.LAST), Task.EMBED, 1),
        (Pooling(mode=PoolingMode.CLS, task=Task.SCORE), Task.SCORE, 1),
    ],
)
def test_what_makes_vectors_or_scores_starts_whole(
    pooling: Pooling | None, task: Task, stages: int
) -> None:
    """The fetch takes 12 s over one of two links, and 6 s over both; 9 s are there."""
    plain = model()
    asked = replace(
        plain,
        uri="s3://bucket/m",
        slo=Slo(ttft_ms=9000.0, tpot_ms=1_000_000.0),
        spec=replace(plain.spec, pooling=pooling),
    )
    assert asked.spec.task is task
    nodes = tuple(replace(node(), node_id=NodeId(f"n{at}"), nic_bytes_per_s=5.0) for at in range(2))
    workers = tuple(replace(worker(at), node_id=one.node_id) for at, one in enumerate(nodes))
    demand = Demand(model=asked.name, waiting=1, oldest_age_s=0.1, deadline_in_s=8.9)
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(asked,),
        nodes=nodes,
        workers=workers,
        demand=(demand,),
    )
    known = KnownStarts(fetches=FetchBooks(capacities=link_capacities(nodes)))
    scheme = choose_scheme(asked, snapshot, RULES, known=known).scheme
    assert scheme is not None
    assert scheme.pipeline_size == stages
