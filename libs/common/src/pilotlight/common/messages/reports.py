"""Workers and loaders to all services: what is held, every 200 ms and at once on change."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.cluster import NodeFacts, WorkerFacts
from pilotlight.policy.ids import Epoch, NodeId, WorkerId

REPORT_INTERVAL_S = 0.2

WORKER_REPORTS = "v1.report.worker.*"
LOADER_REPORTS = "v1.report.loader.*"


def worker_report_subject(worker_id: WorkerId) -> str:
    """``WorkerReport``."""
    return f"v1.report.worker.{worker_id}"


def loader_report_subject(node_id: NodeId) -> str:
    """``LoaderReport``."""
    return f"v1.report.loader.{node_id}"


class WorkerReport(Message, frozen=True, kw_only=True):
    """A worker's own view of itself. ``incarnation`` changes when its process does."""

    facts: WorkerFacts
    incarnation: str
    epoch_seen: Epoch
    seq: int = 0
    """Counts the reports of an incarnation from 1, so that one that comes late is known to be old.
    0: of a release that does not."""


class LoaderReport(Message, frozen=True, kw_only=True):
    """A node's loader: its facts, and its workers whose process or socket ended."""

    facts: NodeFacts
    incarnation: str
    epoch_seen: Epoch
    dead_workers: tuple[WorkerId, ...] = ()
    seq: int = 0
    """As in ``WorkerReport``."""


class GatewayInfo(Message, frozen=True, kw_only=True):
    """Value in the KV bucket ``gateways``."""

    gateway_id: str
    url: str
