"""A node's reports as changes of one state: what its loader says, and what a listener has heard.

The state is a set of parts, each as the bytes that it was said in: the loader's own report, and one
for each worker. Every report carries the digest of all of them. A listener that finds another
digest than its own has missed something, in whatever way, and asks for the whole.

No I/O and no clock: parts and the time go in, reports come out, and the reverse.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from pilotlight.common.messages.reports import (
    HEARTBEAT_S,
    LOADER_PART,
    WHOLE_EVERY_S,
    NodeReport,
)
from pilotlight.common.newest import Newest
from pilotlight.policy.ids import NodeId, WorkerId

NO_PARTS = 0
_DIGEST_BYTES = 8


SAME_MOMENT_S = 0.1


def aged_alike(before_s: float, now_s: float, elapsed_s: float) -> bool:
    """Whether an age is what it was, and what has passed since: it counts from the same moment.

    0 is of something that is in use.
    """
    if before_s == 0.0 and now_s == 0.0:
        return True
    return abs(before_s + elapsed_s - now_s) <= SAME_MOMENT_S


def part_hash(key: str, part: bytes) -> int:
    """Of one part under its key."""
    return int.from_bytes(blake2b(part, digest_size=_DIGEST_BYTES, key=key.encode()[:64]).digest())


def state_digest(combined: int) -> str:
    """The digest of a state whose parts' hashes, combined by exclusive or, are this."""
    return f"{combined:016x}"


@dataclass(slots=True)
class _Said:
    part: msgspec.Raw
    hash: int
    at_s: float


class NodeTeller:
    """What a loader says of its node."""

    def __init__(self, node_id: NodeId, incarnation: str, now_s: float) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._seq = 0
        self._parts: dict[str, _Said] = {}
        self._combined = NO_PARTS
        self._changed: dict[str, None] = {}
        self._gone: dict[WorkerId, None] = {}
        self._is_asked = True
        self._said_s = now_s - HEARTBEAT_S
        # Nodes that start together do not say all they have together for ever.
        phase = part_hash("", node_id.encode()) / (1 << 8 * _DIGEST_BYTES)
        self._whole_at_s = now_s + phase * WHOLE_EVERY_S

    def put(self, key: str, part: bytes, now_s: float) -> None:
        """Take a part that is other than before."""
        self._forget(key)
        said = _Said(msgspec.Raw(part), part_hash(key, part), now_s)
        self._parts[key] = said
        self._combined ^= said.hash
        self._changed[key] = None
        self._gone.pop(WorkerId(key), None)

    def keep(self, keys: set[str]) -> None:
        """Speak for no others."""
        for key in [key for key in self._parts if key not in keys]:
            self._forget(key)
            self._changed.pop(key, None)
            self._gone[WorkerId(key)] = None

    def ask(self) -> None:
        """A listener wants the whole."""
        self._is_asked = True

    def wait_s(self, now_s: float) -> float:
        """How long until something has to be said, if nothing changes."""
        if self._changed or self._gone or self._is_asked:
            return 0.0
        return max(0.0, self._said_s + HEARTBEAT_S - now_s)

    def report(self, silent_s: dict[WorkerId, float], now_s: float) -> NodeReport:
        """What is to be said now.

        Args:
            silent_s: workers that have said nothing for a while, and for how long.
            now_s: on any monotonic clock, the same one for all calls.
        """
        whole = self._is_asked or now_s >= self._whole_at_s
        told = self._parts if whole else self._changed
        self._seq += 1
        report = NodeReport(
            node_id=self._node_id,
            incarnation=self._incarnation,
            seq=self._seq,
            digest=state_digest(self._combined),
            parts={key: self._parts[key].part for key in told},
            gone=() if whole else tuple(self._gone),
            whole=whole,
            ages_s={
                key: round(now_s - self._parts[key].at_s, 3)
                for key in told
                if key not in self._changed
            },
            silent_s=silent_s,
        )
        self._said_s = now_s
        if now_s >= self._whole_at_s:
            self._whole_at_s = now_s + WHOLE_EVERY_S
        self._changed, self._gone, self._is_asked = {}, {}, False
        return report

    def _forget(self, key: str) -> None:
        before = self._parts.pop(key, None)
        if before is not None:
            self._combined ^= before.hash


@dataclass(slots=True)
class _Node:
    incarnation: str
    hashes: dict[str, int] = field(default_factory=dict[str, int])
    combined: int = NO_PARTS

    def put(self, key: str, value: int) -> None:
        self.combined ^= self.hashes.get(key, NO_PARTS) ^ value
        self.hashes[key] = value

    def drop(self, key: str) -> None:
        self.combined ^= self.hashes.pop(key, NO_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWord:
    """What a report adds to what its listener knew."""

    parts: dict[str, msgspec.Raw]
    """Those that are new to it."""
    workers: tuple[WorkerId, ...]
    """All that the loader speaks for, as far as the listener knows."""
    complete: bool
    """The listener has the node's whole state; otherwise it has to ask."""


class NodeReader:
    """What a listener has heard of all nodes."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Node] = {}
        self._newest = Newest()

    def hear(self, report: NodeReport) -> NodeWord | None:
        """Take a report; None when it was overtaken by a later one."""
        if not self._newest.is_news(report.node_id, report.incarnation, report.seq):
            return None
        node = self._nodes.get(report.node_id)
        if node is None or node.incarnation != report.incarnation:
            node = self._nodes[report.node_id] = _Node(report.incarnation)
        fresh: dict[str, msgspec.Raw] = {}
        for key, part in report.parts.items():
            value = part_hash(key, bytes(part))
            if node.hashes.get(key) != value:
                node.put(key, value)
                fresh[key] = part
        unspoken = node.hashes.keys() - report.parts.keys() if report.whole else report.gone
        for key in tuple(unspoken):
            node.drop(key)
        return NodeWord(
            parts=fresh,
            workers=tuple(WorkerId(key) for key in node.hashes if key != LOADER_PART),
            complete=state_digest(node.combined) == report.digest,
        )

    def distrust(self, node_id: NodeId, key: str) -> None:
        """A part could not be used: it has to be said again."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.drop(key)

    def forget(self, node_id: NodeId) -> None:
        """The node is gone."""
        self._nodes.pop(node_id, None)
