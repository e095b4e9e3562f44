"""Disk tiers: what nodes keep beyond what fits into their host pools, as their loaders do.

What was brought to a node is on its disk as soon as it is in its pool: writing takes no time. What
was written or read the longest ago goes first.
"""

from dataclasses import dataclass, field

from pilotlight.policy.cluster import Copy, LinkSpeed, OriginKind, Tier
from pilotlight.policy.coldstart.facts import DISK
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.model import Model


@dataclass(slots=True, eq=False)
class Disk:
    """One node's."""

    capacity_bytes: int
    bytes_per_s: float
    """All reads together."""
    copies: dict[Digest, frozenset[int]] = field(default_factory=dict[Digest, "frozenset[int]"])
    """The model that was used the longest ago is first."""
    _models: dict[Digest, Model] = field(default_factory=dict[Digest, Model])

    def has(self, digest: Digest, parts: frozenset[int]) -> bool:
        """Whether parts are here."""
        return parts <= self.copies.get(digest, frozenset())

    def keep(self, model: Model, parts: frozenset[int]) -> None:
        """Parts were brought to the node, from here or elsewhere; a model that is larger than the
        disk is not kept.
        """
        self._models[model.digest] = model
        self.copies[model.digest] = self.copies.pop(model.digest, frozenset()) | parts
        used = sum(map(self._size, self.copies))
        for digest in list(self.copies):
            if used <= self.capacity_bytes:
                return
            used -= self._size(digest)
            del self.copies[digest]

    def copies_of(self, node_id: NodeId) -> tuple[Copy, ...]:
        """As the node reports them."""
        return tuple(
            Copy(
                digest=digest,
                node_id=node_id,
                tier=Tier.DISK,
                parts=tuple(sorted(parts)),
                size_bytes=self._size(digest),
            )
            for digest, parts in self.copies.items()
        )

    @property
    def link(self) -> LinkSpeed:
        """What it gives, as the node reports it."""
        return LinkSpeed(kind=OriginKind.DISK, name=DISK, bytes_per_s=self.bytes_per_s)

    def _size(self, digest: Digest) -> int:
        parts = self._models[digest].spec.part_bytes
        return sum(parts[part] for part in self.copies[digest])
