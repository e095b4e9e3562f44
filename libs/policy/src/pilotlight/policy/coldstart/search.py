"""The policy ``pilotlight``: the best scheme for a start, exactly (design 6.1).

ParaServe's algorithm 1 takes the first s and w that meet the SLOs, with the servers that come first
by one key, and knows one source that is never the bottleneck. This one compares what the key
cannot see: which of several sources each stage takes, that stages of one group share a source and
so are slower together, that a later stage may be ready later, and the room that a stage really
needs.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from pilotlight.policy.coldstart.contention import ROUNDING_S, LinkName
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.coldstart.options import Option, StageOptions, fetch_s, stage_options
from pilotlight.policy.coldstart.servers import (
    Server,
    StartRequest,
    StartRules,
    StartScheme,
    predict,
)
from pilotlight.policy.ids import NodeId


def choose_start(
    request: StartRequest, servers: Sequence[Server], rules: StartRules
) -> StartScheme | None:
    """The best of all schemes on up to ``rules.nodes`` nodes, in the order (SLO met, s, device
    bytes, TTFT); None when there is none that running fetches allow.

    1. for each s from ``request.instances`` on: stages of even bytes, each on a node of its own, or
       on a device of its own where those of a node have each their bus (``rules.share_nodes``)
    2. w full-memory workers, as many as are to become instances: more only where a worker's share
       of the computation is that of its memory. None, and s > 1, where no device could hold the
       whole model: the group becomes a shorter pipeline, or stays as it is
    3. of more nodes than the rules compare, the best for each stage by its own term of the
       prediction, as if it were alone: 1/b + 1/p misses the best one (notes, 2.1)
    4. all choices of nodes, roles and sources, depth first; one is left as soon as what it has
       chosen cannot become better than the best so far, and of nodes that are alike one is tried
    5. a choice that would make a running fetch late is none (``FetchBooks.refusal``)
    6. the least s with a scheme that meets the SLO; without one, the least TTFT of any s
    7. after ``rules.max_steps`` steps the best so far, once there is one: the servers that are
       ready the soonest are tried first
    """
    best: StartScheme | None = None
    steps = rules.max_steps
    wanted, layers = max(1, request.instances), request.model.spec.num_layers
    least = wanted if request.whole else 2
    for size in range(least, min(rules.max_stages, layers) + 1):  # 1
        stages = even_stages(request.model.spec, size)
        only_full = request.whole and size == wanted
        options = stage_options(request, servers, stages, rules, only_full=only_full)  # 3
        for full in _full(request, rules, wanted, size):  # 2
            if options is not None:
                search = _Search(request, rules, options, full, best, steps)
                search.deepen(0, full)
                best, steps = search.best, search.steps
        if best is not None and best.meets_slo:  # 6
            return best
    return best


def _full(request: StartRequest, rules: StartRules, wanted: int, size: int) -> range:
    """Rule 2: how many full-memory workers a group may have."""
    if not request.whole:
        return range(1)
    return range(wanted, (size if rules.proportional_shares else wanted) + 1)


@dataclass(slots=True)
class _Search:
    """Rules 4, 5 and 7 for one s and w."""

    request: StartRequest
    rules: StartRules
    stages: Sequence[StageOptions]
    full: int
    best: StartScheme | None
    steps: int | None = None
    """Left; None: as many as it takes."""
    _hop_s: float = field(init=False)
    _chosen: list[Option] = field(init=False, default_factory=list["Option"])
    _counts: dict[LinkName, int] = field(init=False, default_factory=dict["LinkName", int])
    """How many of the group use each link: the chosen ones, and of the others what is sure."""
    _rest: list[tuple[float, float, float]] = field(init=False)
    """Of the stages from each one on, at their best: what they delay the first token to, their
    prefill with hops, their decode with hops."""

    def __post_init__(self) -> None:
        self._hop_s = self.rules.hop_s if len(self.stages) > 1 else 0.0
        for stage in self.stages:
            self._count(stage.links, 1)
        self._rest = [(0.0, 0.0, 0.0)]
        for stage in reversed(self.stages):
            latest_s, following_s, decode_s = self._rest[-1]
            following_s += self._hop_s
            latest_s = max(latest_s, stage.fastest.through_s(following_s))
            following_s += stage.fastest.prefill_s
            decode_s += stage.fastest.decode_s + self._hop_s
            self._rest.append((latest_s, following_s, decode_s))
        self._rest.reverse()

    def deepen(self, at: int, full: int) -> None:
        """Choose the stages from ``at`` on, ``full`` of them with room for the whole model."""
        if at == len(self.stages):
            scheme = predict(self.request, [one.assigned for one in self._chosen], self.rules)
            if not scheme.refusal and (self.best is None or scheme.order < self.best.order):  # 5
                self.best = scheme
            return
        stage, left = self.stages[at], len(self.stages) - at
        used = {one.node_id for one in self._chosen}
        tried: set[tuple[object, ...]] = set()
        self._count(stage.links, -1)
        following_s = self.request.spent_s + self._rest[at + 1][1] + self._hop_s
        for option in stage.options:
            if following_s + option.cost.through_s() > self._latest_s():
                break  # As all that follow: the soonest come first.
            if self.steps is not None:  # 7
                if self.steps <= 0 and self.best is not None:
                    break
                self.steps -= 1
            if at == 0 and full > 0 and self.rules.full_leads and not option.assigned.full:
                continue
            still = full - option.assigned.full
            if not self._is_free(option, used) or not 0 <= still <= left - 1:
                continue
            likeness = option.likeness
            if option.node_id in used:
                likeness = (*likeness, option.node_id)
            if likeness in tried:
                continue
            tried.add(likeness)
            self._chosen.append(option)
            self._count(option.links, 1)
            if self._may_win(still):
                self.deepen(at + 1, still)
            self._count(option.links, -1)
            self._chosen.pop()
        self._count(stage.links, 1)

    def _is_free(self, option: Option, used: Set[NodeId]) -> bool:
        """Whether an option may be chosen beside what is chosen already."""
        if option.node_id not in used:
            return True
        if not self.rules.share_nodes or not option.assigned.server.own_bus:
            return False
        beside = (one.assigned.server for one in self._chosen if one.node_id == option.node_id)
        return all(
            one.own_bus and one.worker_id != option.assigned.server.worker_id for one in beside
        )

    def _count(self, links: Sequence[LinkName] | frozenset[LinkName], more: int) -> None:
        for link in links:
            self._counts[link] = self._counts.get(link, 0) + more

    def _latest_s(self) -> float:
        """No scheme with a later first token is better than the best so far."""
        slo_s = self.request.model.slo.ttft_ms / 1000
        if self.best is None:
            return math.inf
        return ROUNDING_S + (slo_s if self.best.meets_slo else max(slo_s, self.best.ttft_s))

    def _may_win(self, full: int) -> bool:
        """Whether the rest, at its best and in the way of nothing, would make a better scheme."""
        if self.best is None:
            return True
        request, slo = self.request, self.request.model.slo
        latest_s, following_s, decode_s = self._rest[len(self._chosen)]
        size_bytes = self._least_bytes(full)
        for option in reversed(self._chosen):
            following_s += self._hop_s
            fetching_s = fetch_s(request, option, self._counts)
            latest_s = max(latest_s, option.cost.through_s(following_s, fetching_s))
            following_s += option.cost.prefill_s
            decode_s += option.cost.decode_s + self._hop_s
            size_bytes += option.room_bytes
        ttft_s, size = request.spent_s + latest_s, len(self.stages)
        if ttft_s * 1000 <= slo.ttft_ms and decode_s * 1000 <= slo.tpot_ms:
            return (False, size, size_bytes, ttft_s) < self.best.order
        return (True, ttft_s, size, size_bytes) < self.best.order

    def _least_bytes(self, full: int) -> int:
        """Room of the stages that are not chosen yet: full memory where it costs least more."""
        rest = self.stages[len(self._chosen) :]
        more = sorted(stage.full_bytes - stage.low_bytes for stage in rest)
        return sum(stage.low_bytes for stage in rest) + sum(more[:full])
