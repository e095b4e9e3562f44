"""Rows of the live view: of each node, model and transfer what a list of thousands shows.

Pure: facts in, rows out. A row is small, since thousands are sent; pages of one node or model read
the rest themselves.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pilotlight.policy.cluster import (
    RESIDENT,
    Liveness,
    NodeFacts,
    Transfer,
    WorkerFacts,
)
from pilotlight.policy.instance import SERVING, STARTING
from pilotlight.policy.model import Model
from pilotlight.policy.plan import Instance, InstanceState

MODELS_IN_BAR = 6
"""Models of a node that are named one by one; the rest is one share."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one model takes of a node's device memory."""

    model: str
    size_bytes: int


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node in a list."""

    key: str
    host: str
    state: str
    """``ready``, ``draining``, ``suspect``, or ``away`` while its loader does not report."""
    kinds: dict[str, int]
    """Devices that report, by kind."""
    unwell: int
    """Devices that are degraded or failed."""
    memory_bytes: int
    used_bytes: int
    shares: tuple[Share, ...]
    """The largest first; the rest has an empty name."""
    running: int
    queued: int
    pool_bytes: int
    pool_used_bytes: int
    transfers: int
    bytes_per_s: float


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a list."""

    key: str
    state: str
    """``cold``, ``starting``, ``ready``, ``draining``, or ``failed`` when its last start was."""
    reason: str
    ready: int
    starting: int
    in_flight: int
    phase: str
    fetched: float | None
    size_bytes: int
    pinned: bool
    min_instances: int
    max_instances: int
    ttft_ms: float


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch that is under way."""

    key: str
    node_id: str
    model: str
    digest: str
    priority: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float | None
    age_s: float
    origins: tuple[str, ...]


class StartState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a model's start is, and why its last one failed."""

    phase: str = ""
    fetched: float | None = None
    failure: str = ""


def node_row(key: str, node: NodeFacts | None, workers: Iterable[WorkerFacts]) -> NodeRow:
    """A node by the reports of its loader and its workers.

    Args:
        key: the node's id.
        node: what its loader reported last; None: nothing.
        workers: its workers.
    """
    alive = [worker for worker in workers if worker.liveness is not Liveness.DEAD]
    by_model: Counter[str] = Counter()
    for worker in alive:
        for held in worker.held:
            if held.state in RESIDENT:
                by_model[held.model] += held.device_bytes
    transfers = node.transfers if node is not None else ()
    return NodeRow(
        key=key,
        host=node.host if node is not None else "",
        state=_node_state(node),
        kinds=dict(sorted(Counter(worker.device.kind.value for worker in alive).items())),
        unwell=sum(worker.health.state.value in ("degraded", "failed") for worker in alive),
        memory_bytes=sum(worker.device.memory_bytes for worker in alive),
        used_bytes=sum(worker.used_bytes for worker in alive),
        shares=_shares(by_model),
        running=sum(worker.running_requests for worker in alive),
        queued=sum(worker.queue_requests for worker in alive),
        pool_bytes=node.pool_bytes if node is not None else 0,
        pool_used_bytes=node.pool_bytes - node.pool_free_bytes if node is not None else 0,
        transfers=len(transfers),
        bytes_per_s=sum(transfer.bytes_per_s or 0.0 for transfer in transfers),
    )


def model_row(
    model: Model,
    instances: Sequence[Instance],
    in_flight: int,
    start: StartState,
) -> ModelRow:
    """A model by its instances.

    Args:
        model: as it is registered.
        instances: its instances, as the bucket shows them.
        in_flight: requests on its stages, as workers report them.
        start: how far its start is.
    """
    draining = sum(one.state is InstanceState.DRAINING for one in instances)
    ready = sum(one.state in SERVING for one in instances)
    starting = sum(one.state in STARTING for one in instances)
    if ready:
        state = "ready"
    elif starting:
        state = "starting"
    elif draining:
        state = "draining"
    else:
        state = "failed" if start.failure else "cold"
    return ModelRow(
        key=model.name,
        state=state,
        reason=start.failure if state == "failed" else "",
        ready=ready,
        starting=starting,
        in_flight=in_flight,
        phase=start.phase if state == "starting" else "",
        fetched=start.fetched if state == "starting" else None,
        size_bytes=sum(model.spec.part_bytes),
        pinned=model.pinned,
        min_instances=model.scaling.min_instances,
        max_instances=model.scaling.max_instances,
        ttft_ms=model.slo.ttft_ms,
    )


def transfer_row(node: NodeFacts, transfer: Transfer) -> TransferRow:
    """A fetch of a node, as its loader reports it."""
    return TransferRow(
        key=f"{node.node_id} {transfer.digest}",
        node_id=node.node_id,
        model=transfer.model,
        digest=transfer.digest,
        priority=transfer.priority.value,
        # Parts are counted with what pads them: at the end a little more may be there.
        done_bytes=min(transfer.done_bytes, transfer.total_bytes),
        total_bytes=transfer.total_bytes,
        bytes_per_s=transfer.bytes_per_s,
        age_s=round(transfer.age_s, 1),
        origins=tuple(f"{share.kind.value} {share.name}" for share in transfer.origins),
    )


def _node_state(node: NodeFacts | None) -> str:
    if node is None or node.liveness is Liveness.DEAD:
        return "away"
    if node.draining:
        return "draining"
    return "suspect" if node.liveness is Liveness.SUSPECT else "ready"


def _shares(by_model: Counter[str]) -> tuple[Share, ...]:
    ranked = sorted(by_model.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = sum(size for _, size in ranked[MODELS_IN_BAR:])
    named = [Share(model=model, size_bytes=size) for model, size in ranked[:MODELS_IN_BAR]]
    return (*named, *([Share(model="", size_bytes=rest)] if rest else ()))
