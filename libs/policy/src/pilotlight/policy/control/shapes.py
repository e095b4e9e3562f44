"""What a prediction sees of a worker beside its room: workers of one shape are alike to it."""

from dataclasses import dataclass, replace

from pilotlight.policy.cluster import Liveness, NodeFacts
from pilotlight.policy.model import Model


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a node's link carries, and what it was found to give."""

    transfers: int
    slowness: int = 0
    """How far below what the node reports its fetches stayed, as a power of two."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a prediction sees of a worker, but for its room and what it holds."""

    device_kind: str
    load_bytes_per_s: float
    memory_bytes_per_s: float
    granule_bytes: int
    degraded: bool
    nic_bytes_per_s: float
    transfers: int
    pool_unit_bytes: int
    pool_bytes: int
    slowness: int = 0

    def fits(self, node: NodeFacts, link: LinkUse) -> bool:
        """Whether a usable node leaves its workers in this shape."""
        return links_of(node, link) == (
            self.nic_bytes_per_s,
            self.transfers,
            self.pool_unit_bytes,
            self.pool_bytes,
            self.slowness,
        )

    def beside(self, node: NodeFacts, link: LinkUse) -> "Shape":
        """The same device beside another link."""
        nic, transfers, pool_unit_bytes, pool_bytes, slowness = links_of(node, link)
        return replace(
            self,
            nic_bytes_per_s=nic,
            transfers=transfers,
            pool_unit_bytes=pool_unit_bytes,
            pool_bytes=pool_bytes,
            slowness=slowness,
        )

    def pool_holds(self, model: Model) -> bool:
        """Whether the host pool could ever hold a model."""
        unit_bytes = self.pool_unit_bytes
        return (
            sum(-(-size // unit_bytes) * unit_bytes for size in model.spec.part_bytes)
            <= self.pool_bytes
        )


def is_usable(node: NodeFacts) -> bool:
    """Whether a node's workers may be given anything."""
    return node.liveness is Liveness.ALIVE and not node.draining


def links_of(node: NodeFacts, link: LinkUse) -> tuple[float, int, int, int, int]:
    """What a node adds to the shapes of its workers."""
    pool = node.pool_unit_bytes, node.pool_bytes
    return node.nic_bytes_per_s, link.transfers, *pool, link.slowness
