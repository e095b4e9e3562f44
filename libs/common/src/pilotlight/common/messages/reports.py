"""Workers and loaders to all services: what is held.

In one of two ways. *Coalesced*: a node's loader says what changed of the node and of its workers,
and otherwise a digest of all that it said before (``NodeReport``). *Each for itself*: a worker and
a loader say all they have every 200 ms and at once on change, as every release understands it;
workers do so while their loader says nothing for them.
"""

from typing import Any

import msgspec

from pilotlight.common.messages.codec import Message
from pilotlight.policy.cluster import NodeFacts, WorkerFacts
from pilotlight.policy.ids import Epoch, NodeId, WorkerId

_EMPTY: type[dict[Any, Any]] = dict
"""By this very name: msgspec leaves out what is empty then."""
REPORT_INTERVAL_S = 0.2
HEARTBEAT_S = 0.5
"""Between two reports of a node of which nothing changed: half of what makes it suspect."""
WHOLE_EVERY_S = 30.0
"""A node says all it has so often, whatever it is asked."""
LOADER_PART = ""
"""Key of the loader's own part in a ``NodeReport``; the others are ids of workers."""

NODE_REPORTS = "v1.report.node.*"
COALESCE_SUBJECT = "v1.report.coalesce"
"""``Coalesce``."""
WORKER_REPORTS = "v1.report.worker.*"
LOADER_REPORTS = "v1.report.loader.*"


def worker_report_subject(worker_id: WorkerId) -> str:
    """``WorkerReport``."""
    return f"v1.report.worker.{worker_id}"


def loader_report_subject(node_id: NodeId) -> str:
    """``LoaderReport``."""
    return f"v1.report.loader.{node_id}"


def node_report_subject(node_id: NodeId) -> str:
    """``NodeReport``."""
    return f"v1.report.node.{node_id}"


def whole_subject(node_id: NodeId) -> str:
    """``TellWhole``."""
    return f"v1.report.whole.{node_id}"


class WorkerReport(Message, frozen=True, kw_only=True):
    """A worker's own view of itself. ``incarnation`` changes when its process does."""

    facts: WorkerFacts
    incarnation: str
    epoch_seen: Epoch
    seq: int = 0
    """Counts the reports of an incarnation from 1, so that one that comes late is known to be old.
    0: of a release that does not."""


class LoaderReport(Message, frozen=True, kw_only=True):
    """A node's loader: its facts, and its workers whose process or socket ended, or that have none
    yet.
    """

    facts: NodeFacts
    incarnation: str
    epoch_seen: Epoch
    dead_workers: tuple[WorkerId, ...] = ()
    seq: int = 0
    """As in ``WorkerReport``."""


class NodeReport(Message, frozen=True, kw_only=True):
    """A node by its loader: what changed, and a digest of the whole.

    Parts are ``LoaderReport`` and ``WorkerReport``, each as the bytes that it was said in.
    """

    node_id: NodeId
    incarnation: str
    seq: int
    """Counts the reports of an incarnation from 1."""
    digest: str
    """Of all parts of the node, with this report's: see ``state_digest``."""
    parts: dict[str, msgspec.Raw] = msgspec.field(default_factory=_EMPTY)
    """Those that are other than they were said before; all of them where ``whole``."""
    gone: tuple[WorkerId, ...] = ()
    """Workers for which the loader speaks no longer. It does not say that they have ended."""
    whole: bool = False
    ages_s: dict[str, float] = msgspec.field(default_factory=_EMPTY)
    """How long ago parts were said first, in seconds; 0 where there is no word of it."""
    silent_s: dict[WorkerId, float] = msgspec.field(default_factory=_EMPTY)
    """Workers that have not said anything to their loader for so long; all others have."""


class TellWhole(Message, frozen=True, kw_only=True):
    """To a loader: a listener has missed something, or begins to listen."""

    node_id: NodeId


class Coalesce(Message, frozen=True, kw_only=True):
    """To all loaders: every listener understands ``NodeReport``."""

    for_s: float
    """Unless it is said again; 0: from now on not any more."""


class Understands(Message, frozen=True, kw_only=True):
    """Value in the KV bucket ``health``: null there is of a release that does not say."""

    node_reports: bool = False


class GatewayInfo(Message, frozen=True, kw_only=True):
    """Value in the KV bucket ``gateways``."""

    gateway_id: str
    url: str
