"""The policy ``paraserve``: algorithm 1 of the paper, as it is printed but for its slips.

It stays beside ours for the paper's figures. Its world: all stages have M/s bytes, a source is
never the bottleneck, a node shares its link among the workers that start on it, and a worker's
compute share is its share of the memory, so that prefill and decode take the factor s - w + w/s
(equations 2 and 5).

The slips that are mended (notes, 2.1): both server lists are sorted by the server's own term of
equation 5, the second one is not descending; it leaves out the full-memory servers;
``GetNodeBandwidth`` answers B/(N+1); w = 0 and w = 1 are one scheme for s = 1; the last resort is a
server that passes the check of contention, if there is one. A low-memory worker needs room for a
real stage.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pilotlight.policy.coldstart.contention import FetchKey, Newcomer, link_counts
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.coldstart.servers import (
    Assigned,
    Offer,
    Server,
    StartRequest,
    StartRules,
    StartScheme,
    least_bytes,
    missing_parts,
    predict,
)
from pilotlight.policy.cost import transfer_s
from pilotlight.policy.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperScheme:
    """What algorithm 1 returns, and what it predicts."""

    assigned: tuple[Assigned, ...]
    ttft_s: float
    """Equation 5."""
    tpot_s: float
    """Equation 2."""
    meets_slo: bool

    @property
    def size(self) -> int:
        """Pipeline size: s."""
        return len(self.assigned)

    @property
    def full_memory_workers(self) -> int:
        """Full-memory workers: w."""
        return sum(one.full for one in self.assigned)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A server with its own term for one s."""

    term_s: float
    server: Server
    offer: Offer | None

    @property
    def key(self) -> tuple[float, str]:
        return self.term_s, self.server.worker_id


def choose_paraserve(
    request: StartRequest, servers: Sequence[Server], rules: StartRules
) -> StartScheme | None:
    """Its choice, with what is really predicted of it (``predict``); None when there is none."""
    found = paper_scheme(request, servers, rules)
    return predict(request, found.assigned, rules) if found is not None else None


def paper_scheme(
    request: StartRequest, servers: Sequence[Server], rules: StartRules
) -> PaperScheme | None:
    """Algorithm 1.

    1. for each s, for each w: the first w of the servers that fit M, by their own term
    2. then s - w of the servers that fit a stage, those of 1 left out; each on a node of its own
    3. equations 5 and 2; the first scheme that meets both SLOs
    4. none: the whole model on the first server that fits it
    """
    last_resort = None
    for size in range(1, min(rules.max_stages, request.model.spec.num_layers) + 1):
        ranked = sorted(_ranked(request, servers, size), key=lambda one: one.key)
        for full in range(1 if size == 1 else rules.least_full, size + 1):
            chosen = _chosen(request, ranked, size, full)
            if chosen is None:
                continue
            scheme = _predicted(request, chosen, size, full, rules)  # 3
            if scheme.meets_slo:
                return scheme
            if size == 1:
                last_resort = scheme
    return last_resort  # 4


def _ranked(request: StartRequest, servers: Iterable[Server], size: int) -> Iterable[_Ranked]:
    """Servers with max(t_cc + t_cu + max(M/(s p), t_l), M/(s b)), those that may not be asked left
    out.
    """
    whole = request.model.spec.whole
    for server in servers:
        fetch_bytes = sum(
            request.model.spec.part_bytes[part]
            for part in missing_parts(request.model, whole, server)
        )
        offer, rate = _bandwidth(request, server, fetch_bytes / size)
        term_s = max(
            server.context_s
            + max(
                transfer_s(request.model.device_bytes(whole) / size, server.load_bytes_per_s),
                server.libraries_s,
                server.init_s,
            ),
            transfer_s(fetch_bytes / size, rate),
        )
        if not math.isinf(term_s):
            yield _Ranked(term_s, server, offer)


def _bandwidth(
    request: StartRequest, server: Server, fetch_bytes: float
) -> tuple[Offer | None, float]:
    """Where a server would take the model from, and b: 0 where a running fetch would be late
    (algorithm 2, ``GetNodeBandwidth``). The paper has one source; of several the first is taken
    that has the model.
    """
    if fetch_bytes <= 0:
        return None, math.inf
    offer = next((one for one in server.offers if one.parts is None), None)
    if offer is None:
        return None, 0.0
    newcomer = Newcomer(
        key=FetchKey(""), links=offer.links[:1], fetch_bytes=fetch_bytes, deadline_s=math.inf
    )
    if request.books.refusal((newcomer,), request.now_s) is not None:
        return offer, 0.0
    rate = request.books.share(newcomer.links, link_counts((newcomer,)))
    return offer, min(rate, offer.bytes_per_s)


def _chosen(
    request: StartRequest, ranked: Sequence[_Ranked], size: int, full: int
) -> tuple[_Ranked, ...] | None:
    """Rules 1 and 2; None when there are too few servers."""
    stages = even_stages(request.model.spec, size)
    used: set[NodeId] = set()
    chosen: list[_Ranked] = []

    def take(count: int, *, whole: bool) -> None:
        for one in ranked:
            if count <= 0:
                return
            room = max(
                least_bytes(request.model, stage, one.server, full=whole) for stage in stages
            )
            if one.server.node_id not in used and room <= one.server.free_bytes:
                used.add(one.server.node_id)
                chosen.append(one)
                count -= 1

    take(full, whole=True)
    if len(chosen) < full:
        return None
    take(size - full, whole=False)
    return tuple(chosen) if len(chosen) == size else None


def _predicted(
    request: StartRequest, chosen: Sequence[_Ranked], size: int, full: int, rules: StartRules
) -> PaperScheme:
    """Equations 5 and 2."""
    factor = size - full + full / size
    hops_s = rules.hop_s * size
    prefill_s = max(one.server.prefill_s for one in chosen)
    decode_s = max(one.server.decode_s for one in chosen)
    stages = even_stages(request.model.spec, size)
    ttft_s = request.spent_s + max(one.term_s for one in chosen) + prefill_s * factor + hops_s
    tpot_s = decode_s * factor + hops_s
    slo = request.model.slo
    return PaperScheme(
        assigned=tuple(
            Assigned(server=one.server, stage=stage, full=at < full, offer=one.offer)
            for at, (one, stage) in enumerate(zip(chosen, stages, strict=True))
        ),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        meets_slo=ttft_s * 1000 <= slo.ttft_ms and tpot_s * 1000 <= slo.tpot_ms,
    )
