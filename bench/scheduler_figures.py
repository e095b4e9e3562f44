"""ParaServe's figures 5 and 7 and its tables 1 and 2: starts by hand in simulated time.

Nothing decides here: the figures show what groups of a given size take, so they are started
directly on the simulator's nodes, workers and engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pilotlight.policy.cluster import HeldState
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.coldstart.servers import stage_share
from pilotlight.policy.control.holds import PartFetch, StageHold
from pilotlight.policy.ids import DecisionId, Generation, InstanceId, ModelName
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.plan import Instance, InstanceState, Placement
from pilotlight.sim.cluster.build import Catalogue, catalogue_of, pace_of
from pilotlight.sim.cluster.engine import Engine, Pace, Request
from pilotlight.sim.cluster.events import Events
from pilotlight.sim.cluster.parts import HOP_S, Parts
from pilotlight.sim.cluster.scenario import CONTENDERS, Contender, Scenario, read_builtin
from pilotlight.sim.cluster.workers import EPOCH, Worker

SIZES = (1, 2, 3, 4)
MEMORY_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of a worker in a group of four: of what a whole instance has."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
BURST = 30
"""Workers of figure 7."""
GROUPS = (4,) * 7 + (2,)
WAYS = {"as before": CONTENDERS["single"], "overlapped": CONTENDERS["paraserve"]}
"""Figure 4(a), and figure 6(a)."""


@dataclass(slots=True)
class Trial:
    """Nodes without a leader."""

    scenario: Scenario
    contender: Contender
    events: Events = field(default_factory=Events)
    catalogue: Catalogue = field(init=False)
    parts: Parts = field(init=False)
    _started: int = 0

    def __post_init__(self) -> None:
        self.catalogue = catalogue_of(self.scenario)
        self.parts = Parts(
            scenario=self.scenario,
            contender=self.contender,
            catalogue=self.catalogue,
            events=self.events,
            wake=lambda: None,
            first=lambda _: None,
            ended=lambda _: None,
        )

    def start(self, model: Model, workers: Sequence[Worker], stages: Sequence[Stage]) -> Instance:
        """Have workers load a stage each; the instance that they will be."""
        self._started += 1
        instance_id, first = InstanceId(f"i{self._started}"), Generation(1)
        for worker, stage in zip(workers, stages, strict=True):
            fetch = PartFetch(
                instance_id=instance_id,
                generation=first,
                model=model,
                parts=tuple(model.spec.parts_of(stage)),
                trace_parent="",
                upstreams=(),
            )
            hold = StageHold(
                instance_id=instance_id,
                generation=first,
                model=model,
                stage=stage,
                device_bytes=model.device_bytes(stage),
                draining=False,
                drain_within_s=None,
                trace_parent="",
            )
            worker.host.obey([fetch], lambda _: "", self.parts.hosts)
            worker.obey([hold])
        return Instance(
            instance_id=instance_id,
            model=model.name,
            digest=model.digest,
            state=InstanceState.READY,
            generation=first,
            epoch=EPOCH,
            placements=tuple(
                Placement(
                    worker_id=worker.worker_id,
                    node_id=worker.host.node_id,
                    stage=stage,
                    device_bytes=model.device_bytes(stage),
                )
                for worker, stage in zip(workers, stages, strict=True)
            ),
            decision_id=DecisionId("by hand"),
            state_since_s=0.0,
            last_used_s=0.0,
        )

    def ready_s(self, instances: Sequence[Instance]) -> list[float]:
        """When all stages of each are loaded."""
        found: dict[InstanceId, float] = {}
        while len(found) < len(instances) and self.events.step(3600.0):
            for one in instances:
                if one.instance_id not in found and self._is_ready(one):
                    found[one.instance_id] = self.events.now_s
        return [found[one.instance_id] for one in instances]

    def _is_ready(self, instance: Instance) -> bool:
        held = (
            self.parts.workers[place.worker_id].held.get(instance.instance_id)
            for place in instance.placements
        )
        return all(one is not None and one.state is HeldState.READY for one in held)


def nodes_only(scenario: Scenario, kind: str, count: int, devices: int = 1) -> Scenario:
    """A scenario's nodes of one kind, so many of them."""
    node = next(one for one in scenario.nodes if one.name == kind)
    return replace(scenario, nodes=(replace(node, count=count, devices=devices),))


def figure_5() -> dict[str, Any]:
    """TTFT and TPOT of Llama2-7B on four A10 servers, by stages and by memory of each worker."""
    scenario = nodes_only(read_builtin("paraserve-testbed-1"), "a10", max(SIZES))
    ttfts = {
        way: [_one_request(scenario, contender, size)[0] for size in SIZES]
        for way, contender in WAYS.items()
    }
    low = [_one_request(scenario, WAYS["overlapped"], size)[1] for size in SIZES]
    return {
        "sizes": list(SIZES),
        "ttft_s": ttfts,
        "tpot_s": low,
        "memory_shares": list(MEMORY_SHARES),
        "tpot_of_four_s": [_tpot_of_four(scenario, share) for share in MEMORY_SHARES],
    }


def _one_request(scenario: Scenario, contender: Contender, size: int) -> tuple[float, float]:
    """TTFT and TPOT of a request that a group of ``size`` starts for, each worker with memory for
    its own stage.
    """
    trial = Trial(scenario, contender)
    model = trial.catalogue.models[ModelName("chat-7b-0000")]
    workers = list(trial.parts.workers.values())[:size]
    instance = trial.start(model, workers, even_stages(model.spec, size))
    request = Request(model.name, 0.0, PROMPT_TOKENS, OUTPUT_TOKENS)
    trial.parts.gateway.submit(request, 0.0)
    trial.ready_s([instance])
    trial.parts.serve(instance)
    while request.finished_s == float("inf") and trial.events.step(3600.0):
        pass
    return round(request.ttft_s, 3), round(request.tpot_s, 4)


def _tpot_of_four(scenario: Scenario, share: float) -> float:
    """Of a group of four whose workers have a share of a whole instance's memory, and compute with
    that share of the device.
    """
    model = catalogue_of(scenario).models[ModelName("chat-7b-0000")]
    stages = even_stages(model.spec, 4)
    factor = sum(stage_share(model, stage) / share for stage in stages)
    pace = replace(pace_of(scenario.family("llama2-7b")), factor=factor, hops_s=4 * HOP_S)
    return round(_batch(pace, 1, PROMPT_TOKENS, OUTPUT_TOKENS)[1], 4)


def _batch(pace: Pace, requests: int, prompt: int, output: int) -> tuple[float, float]:
    """The last first token of requests that come together, and the time of a token."""
    events = Events()
    engine = Engine(events=events, pace=pace, first=lambda _: None, ended=lambda _: None)
    batch = [Request(ModelName("m"), 0.0, prompt, output) for _ in range(requests)]
    for one in batch:
        engine.submit(one)
    while events.step(3600.0):
        pass
    return max(one.ttft_s for one in batch), batch[-1].tpot_s


def figure_7() -> dict[str, Any]:
    """Requests a second that 30 new workers of Llama2-13B carry over time: each on its own, or in
    eight groups that serve as soon as their stages are there.
    """
    scenario = nodes_only(read_builtin("paraserve-testbed-1"), "v100", BURST)
    curves: dict[str, list[tuple[float, int]]] = {}
    for way, contender in WAYS.items():
        curves[f"alone, {way}"] = _capacity(scenario, contender, (1,) * BURST)
    curves["groups, overlapped"] = _capacity(scenario, WAYS["overlapped"], GROUPS)
    return {
        "workers": BURST,
        "groups": list(GROUPS),
        "capacity": curves,
        "full_s": {name: curve[-1][0] for name, curve in curves.items()},
    }


def _capacity(
    scenario: Scenario, contender: Contender, groups: Sequence[int]
) -> list[tuple[float, int]]:
    """From when on how many requests a second are carried: one by each worker that serves."""
    trial = Trial(scenario, contender)
    model = trial.catalogue.models[ModelName("chat-13b-0000")]
    workers = iter(list(trial.parts.workers.values()))
    instances = [
        trial.start(model, [next(workers) for _ in range(size)], even_stages(model.spec, size))
        for size in groups
    ]
    ready = sorted(zip(trial.ready_s(instances), groups, strict=True))
    curve: list[tuple[float, int]] = []
    total = 0
    for at_s, size in ready:
        total += size
        if curve and curve[-1][0] == round(at_s, 3):
            curve.pop()
        curve.append((round(at_s, 3), total))
    return curve


def tables() -> dict[str, Any]:
    """Table 1 as the simulator's engines have it, and table 2 by the paper's rule from table 1.

    The SLO of the first token is five times table 1's, doubled for summaries; that of a token twice
    table 1's, and for chats the speed of reading, 200 ms.
    """
    scenario = read_builtin("paraserve-testbed-1")
    first = {family.name: _batch(pace_of(family), 8, 1024, 32) for family in scenario.families}
    return {
        "table_1": {
            name: {"ttft_s": round(ttft_s, 3), "tpot_s": round(tpot_s, 4)}
            for name, (ttft_s, tpot_s) in first.items()
        },
        "table_2": {
            one.name: {"ttft_s": one.ttft_s, "tpot_s": one.tpot_s} for one in scenario.applications
        },
    }
