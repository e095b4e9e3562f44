"""What each stage of a scheme could be: servers, roles and sources, with what a search has to know
of them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pilotlight.policy.coldstart.contention import FetchKey, LinkName, Newcomer
from pilotlight.policy.coldstart.servers import (
    Assigned,
    Offer,
    Server,
    StartRequest,
    StartRules,
    missing_parts,
    stage_cost_on,
)
from pilotlight.policy.cost import StageCost, stage_room
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.policy.model import Stage


@dataclass(frozen=True, slots=True)
class Option:
    """One way to hold one stage."""

    assigned: Assigned
    room_bytes: int
    fetch_bytes: int
    limit_bytes_per_s: float
    cost: StageCost
    """If nothing else of the group is in its way but what surely is."""
    likeness: tuple[object, ...]
    """Options of two nodes with the same likeness make equal schemes, as long as neither node is
    used."""

    @property
    def node_id(self) -> NodeId:
        """Where it is."""
        return self.assigned.server.node_id

    @property
    def links(self) -> tuple[LinkName, ...]:
        """What its fetch uses."""
        offer = self.assigned.offer
        return offer.links if offer is not None and self.fetch_bytes > 0 else ()

    @property
    def rank(self) -> tuple[float, str]:
        """The soonest ready first."""
        return self.cost.through_s(), self.assigned.server.worker_id


@dataclass(frozen=True, slots=True)
class StageOptions:
    """All ways to hold one stage, the soonest first, and what none of them is below."""

    options: tuple[Option, ...]
    links: frozenset[LinkName]
    """Links that every option's fetch uses."""
    fastest: StageCost
    low_bytes: int
    """Room of a low-memory worker at least; of a full-memory worker where there is no other."""
    full_bytes: int


def stage_options(
    request: StartRequest,
    servers: Sequence[Server],
    stages: Sequence[Stage],
    rules: StartRules,
    *,
    only_full: bool,
) -> list[StageOptions] | None:
    """The options of each stage; None when a stage has none.

    1. servers with room for it, or for the whole model, from each place that has what they miss
    2. not over links on which a running fetch would be late
    3. of workers of one node that look alike the first; as many as there are stages, where they may
       share a start
    4. links that every option of another stage uses are shared with that stage, whatever is chosen
    5. on the best nodes by their own terms

    Args:
        request: What is to be started.
        servers: Where it could go.
        stages: The cut.
        rules: How many nodes are kept.
        only_full: Every worker is a full-memory one.
    """
    looks = _looks(request, servers, stages, only_full)
    found: list[list[Option]] = []
    for stage in stages:
        alike = len(stages) if rules.share_nodes else 1
        found.append(
            _options(request, servers, stage, rules, looks, only_full=only_full, alike=alike)
        )
        if not found[-1]:
            return None
    surely = [_common_links(options) for options in found]  # 4
    listed: list[StageOptions] = []
    for at, options in enumerate(found):
        others: dict[LinkName, int] = defaultdict(int)
        for links in (*surely[:at], *surely[at + 1 :]):
            for link in links:
                others[link] += 1
        shared = [_sharing(request, one, others) for one in options]
        listed.append(_listed(_nearest(shared, rules.nodes), surely[at]))  # 5
    return listed


def fetch_s(request: StartRequest, one: Option, counts: Mapping[LinkName, int]) -> float:
    """How long an option's fetch takes beside newcomers, itself among them, by link."""
    if one.fetch_bytes <= 0:
        return 0.0
    rate = min(one.limit_bytes_per_s, request.books.share(one.links, counts))
    return one.fetch_bytes / rate if rate > 0 else math.inf


def _options(
    request: StartRequest,
    servers: Iterable[Server],
    stage: Stage,
    rules: StartRules,
    looks: tuple[Mapping[WorkerId, tuple[object, ...]], Mapping[NodeId, object]],
    *,
    only_full: bool,
    alike: int,
) -> list[Option]:
    """Rules 1 to 3, with at most ``alike`` workers that look so on one node."""
    model = request.model
    rooms: dict[int, tuple[tuple[bool, int], ...]] = {}
    of_workers, on_nodes = looks
    best: dict[tuple[object, ...], list[Option]] = defaultdict(list)
    for server in servers:
        if server.granule_bytes not in rooms:
            whole = stage_room(model, model.spec.whole, server.granule_bytes).least_bytes
            low = stage_room(model, stage, server.granule_bytes).least_bytes
            roles = ((True, whole),) if only_full else ((True, whole), (False, low))
            rooms[server.granule_bytes] = roles
        fitting = [one for one in rooms[server.granule_bytes] if one[1] <= server.free_bytes]
        if not fitting:
            continue
        missing = missing_parts(model, stage, server)
        size = sum(model.spec.part_bytes[part] for part in missing)
        offers: list[Offer | None] = [one for one in server.offers if one.has(missing)]
        for offer in offers if size > 0 else [None]:
            at = server.offers.index(offer) if offer is not None else -1
            likeness = at, of_workers[server.worker_id], on_nodes[server.node_id]
            keys = {full: (server.node_id, full, *likeness[:2]) for full, _ in fitting}
            most = alike if server.own_bus else 1
            news = [one for one in fitting if not _is_behind(server, best[keys[one[0]]], most)]
            if not news:  # 3
                continue
            newcomer = _newcomer(offer, size)
            if request.books.refusal((newcomer,), request.now_s) is not None:  # 2
                continue
            for full, room in news:
                assigned = Assigned(server=server, stage=stage, full=full, offer=offer)
                cost = stage_cost_on(request, assigned, 0, 0.0, rules)
                limit = newcomer.limit_bytes_per_s
                kept = best[keys[full]]
                kept.append(Option(assigned, room, size, limit, cost, (full, *likeness)))
                kept.sort(key=_worker_id)
                del kept[most:]
    return [one for kept in best.values() for one in kept]


def _is_behind(server: Server, known: Sequence[Option], most: int) -> bool:
    """Whether as many other workers, of which predictions see the same, come first."""
    return len(known) >= most and _worker_id(known[-1]) <= server.worker_id


def _worker_id(option: Option) -> WorkerId:
    return option.assigned.server.worker_id


def _looks(
    request: StartRequest, servers: Sequence[Server], stages: Sequence[Stage], full: bool
) -> tuple[Mapping[WorkerId, tuple[object, ...]], Mapping[NodeId, object]]:
    """All that predictions see of each worker, and of each node: no names.

    A link that one node alone uses, and on which nothing runs, is no more than its capacity.
    """
    books, model = request.books, request.model
    nodes_on: dict[LinkName, NodeId | None] = {}
    for server in servers:
        for offer in server.offers:
            for link in offer.links:
                one = nodes_on.setdefault(link, server.node_id)
                nodes_on[link] = one if one == server.node_id else None

    def plain(link: LinkName) -> object:
        private = nodes_on[link] is not None and not books.on.get(link)
        return books.capacities.get(link, math.inf) if private else link

    offered: dict[int, tuple[object, ...]] = {}
    of_workers: dict[WorkerId, tuple[object, ...]] = {}
    on_nodes: dict[NodeId, list[tuple[object, ...]]] = defaultdict(list)
    rooms: dict[int, tuple[int, ...]] = {}
    for server in servers:
        granule = server.granule_bytes
        if granule not in rooms:
            held = (model.spec.whole, *(() if full else stages))
            rooms[granule] = tuple(stage_room(model, one, granule).least_bytes for one in held)
        # Workers of one node share what it is offered, the same object.
        if id(server.offers) not in offered:
            offered[id(server.offers)] = tuple(
                (one.source, tuple(map(plain, one.links)), one.bytes_per_s, one.parts, one.behind_s)
                for one in server.offers
            )
        look = (
            *server.looks,
            tuple(room <= server.free_bytes for room in rooms[granule]),
            offered[id(server.offers)],
        )
        of_workers[server.worker_id] = look
        on_nodes[server.node_id].append(look)
    return of_workers, {one: frozenset(Counter(looks).items()) for one, looks in on_nodes.items()}


def _sharing(request: StartRequest, one: Option, others: Mapping[LinkName, int]) -> Option:
    """An option with the time of its fetch beside those that surely run, too."""
    counts = dict(others)
    for link in one.links:
        counts[link] = counts.get(link, 0) + 1
    cost = StageCost(
        fetch_s=fetch_s(request, one, counts),
        load_s=one.cost.load_s,
        prefill_s=one.cost.prefill_s,
        decode_s=one.cost.decode_s,
        init_s=one.cost.init_s,
        context_s=one.cost.context_s,
        libraries_s=one.cost.libraries_s,
        streamed_layers=one.cost.streamed_layers,
    )
    return Option(
        one.assigned, one.room_bytes, one.fetch_bytes, one.limit_bytes_per_s, cost, one.likeness
    )


def _common_links(options: Iterable[Option]) -> frozenset[LinkName]:
    each = [frozenset(one.links) for one in options]
    return each[0].intersection(*each[1:])


def _nearest(options: Iterable[Option], nodes: int) -> list[Option]:
    """Of each role those on the best nodes."""
    kept: list[Option] = []
    places: dict[bool, set[NodeId]] = {True: set(), False: set()}
    for one in sorted(options, key=lambda one: one.rank):
        if math.isinf(one.cost.through_s()):
            continue
        known = places[one.assigned.full]
        if one.node_id in known or len(known) < nodes:
            known.add(one.node_id)
            kept.append(one)
    return kept


def _listed(options: Sequence[Option], links: frozenset[LinkName]) -> StageOptions:
    costs = [one.cost for one in options]
    fulls = [one.room_bytes for one in options if one.assigned.full]
    lows = [one.room_bytes for one in options if not one.assigned.full]
    full = min(fulls, default=0)
    return StageOptions(
        options=tuple(options),
        links=links,
        fastest=StageCost(
            fetch_s=min((one.fetch_s for one in costs), default=math.inf),
            load_s=min((one.load_s for one in costs), default=math.inf),
            prefill_s=min((one.prefill_s for one in costs), default=0.0),
            decode_s=min((one.decode_s for one in costs), default=0.0),
            init_s=min((one.init_s for one in costs), default=0.0),
            context_s=min((one.context_s for one in costs), default=0.0),
            libraries_s=min((one.libraries_s for one in costs), default=0.0),
            streamed_layers=max((one.streamed_layers for one in costs), default=1),
        ),
        low_bytes=min(lows, default=full),
        full_bytes=full,
    )


def _newcomer(offer: Offer | None, size: int) -> Newcomer:
    return Newcomer(
        key=FetchKey(""),
        links=offer.links if offer is not None else (),
        fetch_bytes=size,
        deadline_s=math.inf,
        limit_bytes_per_s=offer.limit_bytes_per_s(size) if offer is not None else math.inf,
    )
