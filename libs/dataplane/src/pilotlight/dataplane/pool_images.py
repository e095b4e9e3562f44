"""What the host pool holds: a part's image, and the ready parts of a model."""

from dataclasses import dataclass, field

from pilotlight.dataplane.extents import Extent
from pilotlight.policy.ids import Digest


@dataclass(slots=True, eq=False, kw_only=True)
class PartImage:
    """One part of one model in the pool."""

    digest: Digest
    part: int
    image_bytes: int
    extent: Extent
    slots: list[int]
    """One for each chunk, in order."""
    serial: int
    """Names it among all images that were ever made, also to readers that outlive this loader."""
    entered: int = 0
    """Chunks that are verified."""
    units: dict[int, tuple[bytes, ...]] = field(default_factory=dict[int, tuple[bytes, ...]])
    """The digests of a chunk's units, as far as they are known; code that needs others computes and
    adds them."""
    pins: int = 0
    """Sends that read it: its bytes stay where they are, whatever becomes of it."""
    given_up: bool = False

    @property
    def ready(self) -> bool:
        """All of it is verified, and may be read."""
        return self.entered == len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopy:
    """The ready parts of one model."""

    digest: Digest
    parts: tuple[int, ...]
    size_bytes: int
    """What they take of the pool, rounded up to units."""
    last_used_s: float
