"""Where a start could go, and what it would take there: the facts of a choice, and the prediction
for any choice of workers.

Every policy of this folder, and the exhaustive search that tests hold them to, asks ``predict``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pilotlight.policy.coldstart.contention import (
    FetchBooks,
    FetchKey,
    LinkName,
    Newcomer,
    link_counts,
)
from pilotlight.policy.coldstart.timings import Timings
from pilotlight.policy.cost import (
    HOP_S,
    StageCost,
    group_tpot_s,
    group_ttft_s,
    stage_room,
    transfer_s,
)
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import Model, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A place from which a worker's node could take parts that it has not."""

    source: str
    """A node, the disk tier, or what the model was registered from."""
    links: tuple[LinkName, ...]
    """Those that a fetch from there shares with others, the node's own among them."""
    bytes_per_s: float = math.inf
    """What a fetch gets when it is alone, where that is less than its links would give."""
    parts: frozenset[int] | None = None
    """Parts that are there, or on their way there; None: all."""
    behind_s: float = 0.0
    """When the source has everything itself: the end of a chain is given what it is still
    receiving, and no fetch ends before that."""

    def limit_bytes_per_s(self, fetch_bytes: int) -> float:
        """What a fetch of so much gets at most."""
        if self.behind_s <= 0:
            return self.bytes_per_s
        return min(self.bytes_per_s, fetch_bytes / self.behind_s)

    def has(self, parts: Sequence[int]) -> bool:
        """Whether all of some parts can be had there."""
        return self.parts is None or all(part in self.parts for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A worker that may take a stage: ParaServe's GPU server with its b, p and terms."""

    worker_id: WorkerId
    node_id: NodeId
    free_bytes: int
    """Of device memory, or what can be made free."""
    granule_bytes: int = 1
    load_bytes_per_s: float
    """p."""
    context_s: float = 0.0
    """t_cc + t_cu; 0 on a warm worker."""
    libraries_s: float = 0.0
    """t_l; 0 on a warm worker."""
    init_s: float = 0.0
    """t_init of this model here, or the restore of its artifact."""
    prefill_s: float
    """t_p: the waiting prompt through all layers, with the whole device."""
    decode_s: float
    """t_d: a token through all layers, with the whole device."""
    present: frozenset[int] = frozenset()
    """Parts in the node's host pool."""
    offers: tuple[Offer, ...] = ()
    own_bus: bool = False
    """Its device is filled over a bus that no other worker of its node uses."""

    @property
    def looks(self) -> tuple[object, ...]:
        """All that a prediction sees of it, but for its names, its room and its offers."""
        return (
            self.granule_bytes,
            self.load_bytes_per_s,
            self.context_s,
            self.libraries_s,
            self.init_s,
            self.prefill_s,
            self.decode_s,
            self.present,
            self.own_bus,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRules:
    """Bounds of the choice."""

    max_stages: int = 4
    """The paper's bound on s (section 4.1.2)."""
    proportional_shares: bool = False
    """The paper's platform: a worker's share of the computation is its share of the memory. Else a
    worker computes with its whole device."""
    streaming: bool = True
    """Layers run as soon as they are in place."""
    hop_s: float = HOP_S
    """t_n."""
    nodes: int = 8
    """Nodes that the choice compares in full, the best by their own terms."""
    least_full: int = 0
    """Of ``paraserve``: full-memory workers of a group at least. Algorithm 1 allows groups without
    any, which can become no whole instance; the authors' own scheduler asks for one."""
    full_leads: bool = False
    """Of ``pilotlight``: a group has a full-memory worker at its first stage. It leads, and the
    worker that becomes the whole instance is then the one that requests are at already."""
    share_nodes: bool = False
    """Of ``pilotlight``: workers of one node may share a start where each has a bus of its own.
    What they fetch comes over one link, and is predicted so. The paper's groups span servers."""
    max_steps: int | None = None
    """Workers that the search of ``pilotlight`` tries for some stage, over all sizes; after so many
    it answers with the best that it has found. None: it ends when nothing can be better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """What is to be started."""

    model: Model
    waited_s: float = 0.0
    """t_w: how long its oldest request has waited."""
    instances: int = 1
    """Whole instances that the group is to become (section 6.1): as many workers must hold all."""
    whole: bool = True
    """Some device could hold the whole model. Else its group stays a pipeline: none of its workers
    is a full-memory one."""
    books: FetchBooks = field(default_factory=FetchBooks)
    """Of this moment."""
    now_s: float = 0.0
    overhead_s: float = 0.0
    """Of a start, beside its stages: rows, commands, the way of the request and of its token."""
    restores: bool = False
    """What its engines take beside parameters is the restore of an artifact."""
    timings: Timings = field(default_factory=Timings)
    """For what is told of the chosen nodes."""

    @property
    def spent_s(self) -> float:
        """Of the SLO, whatever is chosen."""
        return self.waited_s + self.overhead_s

    @property
    def deadline_s(self) -> float:
        """When the first token is due."""
        return self.now_s - self.spent_s + self.model.slo.ttft_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """One stage on one server."""

    server: Server
    stage: Stage
    full: bool
    """A full-memory worker: it has room for the whole model, and can become an instance."""
    offer: Offer | None
    """Where its missing parts come from; None: it misses none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """One stage of a scheme: where it goes, from where its bytes come, and until when."""

    worker_id: WorkerId
    node_id: NodeId
    stage: Stage
    full: bool
    device_bytes: int
    source: str
    fetch_bytes: int
    links: tuple[LinkName, ...]
    limit_bytes_per_s: float
    """What its fetch gets at most, however free the links are."""
    fetch_deadline_s: float
    """D = arrival + SLO - prefill - transfers - load tail, on the clock of the request; infinite
    when the scheme misses the SLO: its fetches are late already."""
    cost: StageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StartScheme:
    """A cold-start scheme (s, w, g) and what is predicted of it."""

    stages: tuple[StageChoice, ...]
    ttft_s: float
    tpot_s: float
    meets_slo: bool
    refusal: str = ""
    """Why running fetches forbid it; empty: they do not."""

    @property
    def size(self) -> int:
        """Pipeline size: s."""
        return len(self.stages)

    @property
    def full_memory_workers(self) -> int:
        """Full-memory workers: w."""
        return sum(stage.full for stage in self.stages)

    @property
    def device_bytes(self) -> int:
        """Of all workers."""
        return sum(stage.device_bytes for stage in self.stages)

    @property
    def order(self) -> tuple[bool, float, float, float]:
        """What the least of is the best: (SLO missed, s, device bytes, TTFT). Among schemes that
        miss it the TTFT comes first: there is no SLO left to save resources by.
        """
        if self.meets_slo:
            return (False, self.size, self.device_bytes, self.ttft_s)
        return (True, self.ttft_s, self.size, self.device_bytes)

    def newcomers(self, instance: str) -> tuple[Newcomer, ...]:
        """Its fetches, for the books."""
        return _newcomers(self.stages, instance)


def predict(request: StartRequest, chosen: Sequence[Assigned], rules: StartRules) -> StartScheme:
    """What is predicted of a choice (ParaServe, equations 2 and 5, as design 6.1 has them).

    1. links that several of its own fetches share are shared by all of them
    2. stage i takes t_p and t_d by its share of the layers over its worker's compute share
    3. fetches have until the SLO less all that follows them; the books then say whether they may
    """
    model, whole = request.model, request.model.spec.whole
    spec, slo = model.spec, model.slo
    missing = [
        sum(spec.part_bytes[part] for part in missing_parts(model, one.stage, one.server))
        for one in chosen
    ]
    counts = link_counts(
        Newcomer(key=FetchKey(""), links=one.offer.links, fetch_bytes=size, deadline_s=0.0)
        for one, size in zip(chosen, missing, strict=True)
        if one.offer is not None
    )  # 1
    costs: list[StageCost] = []
    for one, fetch_bytes in zip(chosen, missing, strict=True):
        rate = 0.0
        if one.offer is not None:
            limit = one.offer.limit_bytes_per_s(fetch_bytes)
            rate = min(limit, request.books.share(one.offer.links, counts))
        costs.append(stage_cost_on(request, one, fetch_bytes, rate, rules))
    hop_s = rules.hop_s
    ttft_s = group_ttft_s(costs, request.spent_s, hop_s)
    tpot_s = group_tpot_s(costs, hop_s)
    meets_slo = ttft_s * 1000 <= slo.ttft_ms and tpot_s * 1000 <= slo.tpot_ms
    between_s = hop_s if len(costs) > 1 else 0.0
    stages: list[StageChoice] = []
    for at, (one, fetch_bytes) in enumerate(zip(chosen, missing, strict=True)):
        room = stage_room(model, whole if one.full else one.stage, one.server.granule_bytes)
        deadline_s = math.inf
        if meets_slo:
            deadline_s = request.deadline_s - _after_fetch_s(costs[at:], between_s)
        stages.append(
            StageChoice(
                worker_id=one.server.worker_id,
                node_id=one.server.node_id,
                stage=one.stage,
                full=one.full,
                device_bytes=room.least_bytes,
                source=one.offer.source if one.offer is not None else "",
                fetch_bytes=fetch_bytes,
                links=one.offer.links if one.offer is not None else (),
                limit_bytes_per_s=(
                    one.offer.limit_bytes_per_s(fetch_bytes) if one.offer is not None else math.inf
                ),
                fetch_deadline_s=deadline_s,
                cost=costs[at],
            )
        )
    refusal = request.books.refusal(_newcomers(stages, ""), request.now_s)  # 3
    return StartScheme(
        stages=tuple(stages),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        meets_slo=meets_slo,
        refusal=refusal or "",
    )


def stage_cost_on(
    request: StartRequest, one: Assigned, fetch_bytes: int, rate: float, rules: StartRules
) -> StageCost:
    """Times of one stage on one server.

    Args:
        request: What is to be started.
        one: The stage and the server.
        fetch_bytes: Its bytes that the node has not.
        rate: Bytes a second at which they come.
        rules: Whether layers stream, and what a worker's compute share is.
    """
    model, server, stage = request.model, one.server, one.stage
    share = stage_share(model, stage)
    if rules.proportional_shares and not one.full:
        share = 1.0  # Its share of the layers over its share of the device: both are the stage's.
    return StageCost(
        fetch_s=transfer_s(fetch_bytes, rate),
        load_s=transfer_s(model.device_bytes(stage), server.load_bytes_per_s),
        prefill_s=server.prefill_s * share,
        decode_s=server.decode_s * share,
        init_s=server.init_s,
        context_s=server.context_s,
        libraries_s=server.libraries_s,
        streamed_layers=stage.num_layers if rules.streaming else 1,
    )


def stage_share(model: Model, stage: Stage) -> float:
    """A stage's share of the computation of all layers: that of the bytes that it multiplies with.
    An embedding is looked up; one that is tied to the head is multiplied with in the last stage.
    """
    if stage == model.spec.whole:
        return 1.0
    total = _work(model, model.spec.whole)
    return _work(model, stage) / total if total > 0 else stage.num_layers / model.spec.num_layers


def _work(model: Model, stage: Stage) -> int:
    spec = model.spec
    parts = [part for part in spec.parts_of(stage) if part > 0]
    head = spec.part_bytes[0] if spec.tied_embeddings and stage.stop == spec.num_layers else 0
    return head + sum(spec.part_bytes[part] for part in parts)


def missing_parts(model: Model, stage: Stage, server: Server) -> tuple[int, ...]:
    """Parts of a stage that are not in the host pool of a server's node."""
    return tuple(part for part in model.spec.parts_of(stage) if part not in server.present)


def least_bytes(model: Model, stage: Stage, server: Server, *, full: bool) -> int:
    """Device memory that a worker must give.

    Args:
        model: Which is to be started.
        stage: What the worker is to hold.
        server: Its device's memory comes in granules.
        full: Room for the whole model, whatever the stage.
    """
    return stage_room(model, model.spec.whole if full else stage, server.granule_bytes).least_bytes


def _after_fetch_s(costs: Sequence[StageCost], hop_s: float) -> float:
    """What follows the last byte of the first of some stages: the prefill of what came last, and
    all of the stages after it. Its load runs beside the fetch and ends with it.
    """
    hops_s = hop_s * len(costs)
    own_s = costs[0].prefill_s / costs[0].streamed_layers
    return own_s + hops_s + sum(cost.prefill_s for cost in costs[1:])


def _newcomers(stages: Sequence[StageChoice], instance: str) -> tuple[Newcomer, ...]:
    return tuple(
        Newcomer(
            key=FetchKey(f"{instance}@{stage.worker_id}"),
            links=stage.links,
            fetch_bytes=stage.fetch_bytes,
            deadline_s=stage.fetch_deadline_s,
            limit_bytes_per_s=stage.limit_bytes_per_s,
        )
        for stage in stages
        if stage.fetch_bytes > 0
    )
