"""What befalls the transfer of one model between nodes: drawn from a seed, so that it can be drawn
again.

Pure.
"""

import itertools
import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What goes wrong."""

    SOURCE_DIES = "source dies"
    MIDDLE_DIES = "middle receiver dies"
    LINK_STALLS = "link stalls"
    PEER_LIES = "corrupted chunk from a lying peer"
    OBJECT_CORRUPTED = "corrupted object"
    OBJECT_REPLACED = "object replaced"
    DISK_FULL = "disk full"
    POOL_FULL = "pool full"
    LOADER_RESTARTS = "loader restarted"


STALL_S = 3.0
NODES = ("a", "b", "c", "d")
FULL_DISK = "d"
"""The node whose disk tier is full after the first chunks."""
PATIENT = "b"
"""The node that waits longer than a link stalls."""
HANDING_OVER = "c"
"""The node whose loader leaves its pool to the next one when it is stopped in order."""

Edge = tuple[str, str]
"""The sender, and the receiver."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    node: str = ""
    """The node that dies, stalls, lies, restarts, or has no room."""
    edge: Edge | None = None
    """The link that is held up when it happens; None: it happens by the clock."""
    at_share: float = 0.0
    """After so much of the model has passed that link."""
    after_s: float = 0.0
    """Where there is no such link."""
    how: str = ""
    byte_share: float = 0.0
    """Where a byte is altered."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One schedule."""

    seed: int
    shape: int
    store: str
    """``folder`` or ``s3``."""
    head: str | None
    """The node that has all of the model beforehand."""
    recorded: bool
    """Whether a node has read the model before, so that its digests are recorded."""
    receivers: tuple[str, ...]
    upstreams: dict[str, tuple[str, ...]]
    starts_s: dict[str, float]
    """When each receiver's worker asks for the model."""
    faults: tuple[Fault, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that have to do with it."""
        return (*((self.head,) if self.head is not None else ()), *self.receivers)

    def of(self, *kinds: Kind) -> list[Fault]:
        """Its faults of these kinds."""
        return [fault for fault in self.faults if fault.kind in kinds]

    def line(self) -> str:
        """For people."""
        faults = "; ".join(
            f"{fault.kind}{f' ({fault.how})' if fault.how else ''} at {fault.node or self.store}"
            f"{f', {fault.edge[0]}>{fault.edge[1]} after {fault.at_share:.0%}' if fault.edge else f', after {fault.after_s:.2f} s'}"
            for fault in self.faults
        )
        chain = ", ".join(
            f"{node}<{'/'.join(self.upstreams[node]) or '-'}" for node in self.receivers
        )
        head = self.head or ("recorded" if self.recorded else "nobody")
        return f"shape {self.shape} in {self.store}, has it: {head}; {chain}; {faults}"

    @property
    def is_source_sound(self) -> bool:
        """Whether the object is what was registered, from the begin to the end."""
        return not self.of(Kind.OBJECT_CORRUPTED, Kind.OBJECT_REPLACED)

    def errors_of(self, node: str) -> set[str]:
        """The errors that a receiver may end with; none: it has to get the right bytes."""
        allowed: set[str] = set()
        mine = {fault.kind: fault for fault in self.faults if fault.node == node}
        if Kind.POOL_FULL in mine:
            allowed.add("host_pool_full")
        if (
            Kind.LOADER_RESTARTS in mine
            and mine[Kind.LOADER_RESTARTS].how == "stopped"
            and node != HANDING_OVER
        ):
            # Its memory is gone, and the worker's lease with it.
            allowed.add("source_unavailable")
        if not self.is_source_sound and not self._has_sound_head(node):
            allowed |= {"source_changed"} if self.of(Kind.OBJECT_REPLACED) else set()
            for fault in self.of(Kind.OBJECT_CORRUPTED):
                # For a moment a file's time of modification is another one.
                hasty = self.store == "folder" and fault.how == "meanwhile"
                allowed |= {"corrupt_chunk", "source_changed"} if hasty else {"corrupt_chunk"}
        return allowed

    def _has_sound_head(self, node: str) -> bool:
        """Whether it may ask a node that has everything, which nothing befalls."""
        touched = {fault.node for fault in self.faults} | {
            sender for sender, _ in self._held_up(node)
        }
        restarted = any(fault.node == node for fault in self.of(Kind.LOADER_RESTARTS))
        return self.head in self.upstreams[node] and self.head not in touched and not restarted

    def _held_up(self, node: str) -> list[Edge]:
        return [
            fault.edge for fault in self.faults if fault.edge is not None and fault.edge[1] == node
        ]


SHAPES = 3
LARGEST = 2
"""The shape that fits into no pool that holds something else."""


def draw(seed: int) -> Plan:
    """The schedule of a seed: in each of them something goes wrong."""
    plans = (
        _draw(seed, random.Random(f"transfer {seed} {attempt}")) for attempt in itertools.count()
    )
    return next(plan for plan in plans if plan.faults)


def _draw(seed: int, rng: random.Random) -> Plan:
    kinds = rng.sample(list(Kind), rng.choice((1, 1, 2, 2, 3)))
    names = [name for name in rng.sample(NODES, len(NODES)) if name != FULL_DISK]
    head = names.pop() if Kind.SOURCE_DIES in kinds or rng.random() < 0.6 else None
    least = 1 + (Kind.MIDDLE_DIES in kinds)
    receivers = names[: rng.randint(least, len(names))]
    if Kind.DISK_FULL in kinds or rng.random() < 0.3:
        receivers.insert(rng.randint(0, len(receivers)), FULL_DISK)
    upstreams = {
        receiver: _upstreams(rng, head, receivers[:place])
        for place, receiver in enumerate(receivers)
    }
    drawing = _Drawing(rng, head, receivers, upstreams)
    faults = tuple(drawing.fault(kind) for kind in sorted(kinds, key=list(Kind).index))
    return Plan(
        seed=seed,
        shape=LARGEST if Kind.POOL_FULL in kinds else rng.randrange(SHAPES),
        store=rng.choice(("folder", "s3")),
        head=head,
        recorded=head is not None or Kind.OBJECT_CORRUPTED in kinds or rng.random() < 0.5,
        receivers=tuple(receivers),
        upstreams=upstreams,
        starts_s={
            receiver: rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.5)))
            for receiver in receivers
        },
        faults=tuple(fault for fault in faults if fault is not None),
    )


def _upstreams(rng: random.Random, head: str | None, before: list[str]) -> tuple[str, ...]:
    """The nodes that a receiver is to ask: its predecessor first, mostly."""
    known = [*reversed(before), *([head] if head is not None else [])]
    how = rng.random()
    if how < 0.15:
        rng.shuffle(known)
    elif how < 0.3:
        known = known[:1]
    elif how < 0.4:
        known = []
    return tuple(known)


class _Drawing:
    """Deals faults out to nodes and links that nothing else befalls."""

    def __init__(
        self,
        rng: random.Random,
        head: str | None,
        receivers: list[str],
        upstreams: dict[str, tuple[str, ...]],
    ) -> None:
        self._rng = rng
        self._head = head
        self._receivers = receivers
        self._upstreams = upstreams
        self._free = [*receivers, *([head] if head is not None else [])]
        self._edges: set[Edge] = set()

    def fault(self, kind: Kind) -> Fault | None:
        rng, how, node, edge = self._rng, "", "", None
        match kind:
            case Kind.SOURCE_DIES:
                node, edge = self._take([self._head]), self._edge_from(self._head)
                how = rng.choice(("at once", "without a word"))
            case Kind.MIDDLE_DIES:
                node = self._take(self._receivers[:-1])
                edge, how = self._edge_from(node), rng.choice(("at once", "without a word"))
            case Kind.LINK_STALLS:
                edge = self._edge_from(rng.choice([self._head, *self._receivers[:-1]]))
                how = rng.choice(("process", "link"))
                node = self._take([edge[0]]) if edge is not None else self._take(self._receivers)
                how = how if edge is not None else "process"
            case Kind.PEER_LIES:
                how = rng.choice(("link", "memory")) if self._head in self._free else "link"
                node = self._take(
                    [self._head] if how == "memory" else [self._head, *self._receivers[:-1]]
                )
                edge = self._edge_from(node, fresh=how == "link")
            case Kind.DISK_FULL:
                node = FULL_DISK
            case Kind.POOL_FULL:
                node = self._take(self._receivers)
            case Kind.LOADER_RESTARTS:
                node = self._take([*self._receivers, self._head])
                how, edge = (
                    rng.choice(("killed", "stopped")),
                    self._edge_to(node) or self._edge_from(node),
                )
            case _:
                how, edge = (
                    rng.choice(("before", "meanwhile")),
                    self._edge_from(rng.choice([self._head, *self._receivers])),
                )
        if kind not in (Kind.OBJECT_CORRUPTED, Kind.OBJECT_REPLACED) and not node:
            return None
        if kind is Kind.PEER_LIES and edge is None:
            return None
        if how == "memory":
            # It is wrong from the begin.
            edge = None
        shares = {
            "at_share": rng.uniform(0, 1),
            "after_s": rng.uniform(0, 0.4),
            "byte_share": rng.uniform(0, 1),
        }
        return Fault(kind=kind, node=node, edge=edge, how=how, **shares)

    def _take(self, among: list[str | None] | list[str]) -> str:
        """One of these nodes that nothing else befalls; empty: there is none."""
        free = [node for node in among if node in self._free]
        if not free:
            return ""
        taken = self._rng.choice(free)
        self._free.remove(taken)
        return taken or ""

    def _edge_from(self, sender: str | None, *, fresh: bool = True) -> Edge | None:
        """A link over which a node sends: its receivers ask it first."""
        edges = [(sender, node) for node in self._receivers if sender in self._upstreams[node]]
        return self._free_edge([edge for edge in edges if edge[0] is not None], fresh=fresh)

    def _edge_to(self, node: str) -> Edge | None:
        return self._free_edge([(sender, node) for sender in self._upstreams.get(node, ())[:1]])

    def _free_edge(self, edges: list[tuple[str | None, str]], *, fresh: bool = True) -> Edge | None:
        free = [
            (sender, node)
            for sender, node in edges
            if sender is not None and (not fresh or (sender, node) not in self._edges)
        ]
        if not free:
            return None
        sender, node = self._rng.choice(free)
        self._edges.add((sender, node))
        others = [one for one in self._upstreams[node] if one != sender]
        self._upstreams[node] = (sender, *others)
        return sender, node
