"""The policies of a start by name, and those that ParaServe is compared with (section 8.1), with
one worker for each start.

``single`` is serverless vLLM: the first server that fits. ``locality`` is ServerlessLLM: the server
with the least start-up time, estimated from where copies of the model are cached.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum

from pilotlight.policy.coldstart.paraserve import choose_paraserve
from pilotlight.policy.coldstart.search import choose_start
from pilotlight.policy.coldstart.servers import (
    Assigned,
    Server,
    StartRequest,
    StartRules,
    StartScheme,
    least_bytes,
    missing_parts,
    predict,
)


class StartPolicy(StrEnum):
    """How a start is chosen."""

    SINGLE = "single"
    LOCALITY = "locality"
    PARASERVE = "paraserve"
    PILOTLIGHT = "pilotlight"


def choose_single(
    request: StartRequest, servers: Sequence[Server], rules: StartRules
) -> StartScheme | None:
    """The first server that fits, in the order of ids: it looks at nothing else."""
    first = min(
        (one for one in servers if _fits(request, one)),
        key=lambda one: one.worker_id,
        default=None,
    )
    if first is None:
        return None
    return next(_schemes(request, first, rules), None)


def choose_locality(
    request: StartRequest, servers: Sequence[Server], rules: StartRules
) -> StartScheme | None:
    """The server and the source with the least predicted start, by the fetches that run now; the
    deadlines of others do not count.
    """
    schemes = (
        scheme
        for server in sorted(servers, key=lambda one: one.worker_id)
        if _fits(request, server)
        for scheme in _schemes(request, server, rules)
    )
    return min(schemes, key=lambda one: one.ttft_s, default=None)


Choose = Callable[[StartRequest, Sequence[Server], StartRules], StartScheme | None]
CHOICES: Mapping[StartPolicy, Choose] = {
    StartPolicy.SINGLE: choose_single,
    StartPolicy.LOCALITY: choose_locality,
    StartPolicy.PARASERVE: choose_paraserve,
    StartPolicy.PILOTLIGHT: choose_start,
}


def _fits(request: StartRequest, server: Server) -> bool:
    whole = request.model.spec.whole
    return least_bytes(request.model, whole, server, full=True) <= server.free_bytes


def _schemes(request: StartRequest, server: Server, rules: StartRules) -> Iterator[StartScheme]:
    """The whole model on a server, from each place that has what it misses."""
    whole = request.model.spec.whole
    missing = missing_parts(request.model, whole, server)
    for offer in [one for one in server.offers if one.has(missing)] if missing else [None]:
        yield predict(
            request, (Assigned(server=server, stage=whole, full=True, offer=offer),), rules
        )
