"""Starts that are late: how many workers they get."""

from dataclasses import replace

import pytest

from pilotlight.policy.coldstart.chosen import ChoiceRules, Chosen, KnownStarts, choose_with
from pilotlight.policy.coldstart.contention import FetchBooks
from pilotlight.policy.coldstart.facts import link_capacities
from pilotlight.policy.coldstart.policies import StartPolicy
from pilotlight.policy.coldstart.servers import StartRules
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Slo
from pilotlight.policy.placement import Candidate
from pilotlight.policy.plan import Snapshot
from pilotlight.policy.request import Demand
from pilotlight.policy.testing import NOW_S, Epoch, model, node, worker

RULES = ChoiceRules(start=StartRules(max_stages=2, max_steps=2000))


def chosen(
    slo_s: float,
    waited_s: float,
    evictable_bytes: int = 0,
    prompt_tokens: int = 0,
    waiting: int = 1,
    instances: int = 1,
    policy: StartPolicy = StartPolicy.PILOTLIGHT,
) -> Chosen:
    """What a model gets whose fetch takes 12 s over one of two links, and 6 s over both."""
    asked = replace(
        model(), uri="s3://bucket/m", slo=Slo(ttft_ms=slo_s * 1000, tpot_ms=1_000_000.0)
    )
    nodes = tuple(replace(node(), node_id=NodeId(f"n{at}"), nic_bytes_per_s=5.0) for at in range(2))
    workers = tuple(replace(worker(at), node_id=one.node_id) for at, one in enumerate(nodes))
    demand = Demand(
        model=asked.name,
        waiting=waiting,
        oldest_age_s=waited_s,
        deadline_in_s=slo_s - waited_s,
        prompt_tokens=prompt_tokens,
    )
    snapshot = Snapshot(
        now_s=NOW_S,
        epoch=Epoch(1),
        models=(asked,),
        nodes=nodes,
        workers=workers,
        demand=(demand,),
    )
    found = choose_with(
        asked,
        [
            Candidate(
                worker=one,
                node=at,
                free_bytes=1000 - evictable_bytes,
                evictable_bytes=evictable_bytes,
            )
            for one, at in zip(workers, nodes, strict=True)
        ],
        snapshot,
        replace(RULES, policy=policy),
        KnownStarts(fetches=FetchBooks(capacities=link_capacities(nodes))),
        instances,
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("slo_s", "waited_s", "evictable_bytes", "stages", "meets_slo"),
    [
        pytest.param(9.0, 0.1, 0, 2, True, id="two workers are in time"),
        pytest.param(9.0, 7.0, 0, 1, False, id="late by its waiting: one"),
        pytest.param(9.0, 30.0, 0, 1, False, id="long late: one"),
        pytest.param(1.0, 0.1, 0, 2, False, id="no start could be in time: the least TTFT"),
        pytest.param(1.0, 2.0, 0, 1, False, id="nor could it, and it is late: one"),
        pytest.param(1.0, 0.1, 1000, 1, False, id="nor could it, and others would have to go: one"),
    ],
)
def test_a_late_start_leaves_workers_to_those_that_can_be_in_time(
    slo_s: float, waited_s: float, evictable_bytes: int, stages: int, meets_slo: bool
) -> None:
    found = chosen(slo_s, waited_s, evictable_bytes)
    assert (found.scheme.pipeline_size, found.meets_slo) == (stages, meets_slo)


def test_a_prediction_is_for_the_prompt_that_waits() -> None:
    usual, same, short, long = (
        chosen(9.0, 0.1, prompt_tokens=tokens).scheme.predicted_ttft_s
        for tokens in (0, RULES.usual.prompt_tokens, 1, 100_000)
    )
    assert usual == same
    assert short < usual < long


@pytest.mark.parametrize(
    ("waiting", "instances", "waited_s", "policy", "stages"),
    [
        pytest.param(1, 1, 0.1, StartPolicy.PILOTLIGHT, 1, id="one is in time by one worker"),
        pytest.param(8, 1, 0.1, StartPolicy.PILOTLIGHT, 2, id="the eighth is by two"),
        pytest.param(8, 8, 0.1, StartPolicy.PILOTLIGHT, 1, id="each has an instance of its own"),
        pytest.param(10_000, 1, 0.1, StartPolicy.PILOTLIGHT, 1, id="the last cannot be in time"),
        pytest.param(8, 1, 20.0, StartPolicy.PILOTLIGHT, 1, id="nor can the first"),
        pytest.param(8, 1, 0.1, StartPolicy.SINGLE, 1, id="a policy that looks at the first alone"),
    ],
)
def test_a_start_is_for_all_that_wait_where_it_can_be(
    waiting: int, instances: int, waited_s: float, policy: StartPolicy, stages: int
) -> None:
    """The fetch takes 12 s over one link; of an SLO of 14 s the first prompt leaves enough."""
    found = chosen(
        14.0,
        waited_s,
        prompt_tokens=800,
        waiting=waiting,
        instances=instances,
        policy=policy,
    )
    assert found.scheme.pipeline_size == stages
    assert found.meets_slo == (waited_s < 1.0)


def test_others_that_wait_send_nothing_away() -> None:
    """What is idle goes for the first request, and not to have the others in time, too."""
    found = chosen(14.0, 0.1, evictable_bytes=1000, prompt_tokens=800, waiting=8)
    assert (found.scheme.pipeline_size, found.meets_slo, found.evicts) == (1, True, True)
