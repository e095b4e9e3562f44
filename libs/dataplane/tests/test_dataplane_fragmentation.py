"""How far apart the free bytes of a host pool get, with models of real sizes that come and go for
long.
"""

import random
from pathlib import Path

import pytest

from pilotlight.common.clock import ManualClock
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.ids import Digest

GIB = 1024**3
POOL_BYTES = 64 * GIB
MODELS = 60
FETCHES = 700
BOUND = 0.75
"""What takes less of the free bytes than the rest of this has room at once; for more, another copy
may have to go."""
EXTRA = 0.12
"""Evictions for room in a row, in evictions for room at all."""

# Hidden size, width of the MLP, layers, vocabulary, share of key and value heads: 0.5B to 32B
# models of four families.
SHAPES = (
    (896, 4864, 24, 151_936, 0.14), (1536, 8960, 28, 151_936, 0.16), (2048, 8192, 16, 128_256, 0.25), (2048, 11_008, 36, 151_936, 0.125),
    (2560, 6912, 40, 151_936, 1.0), (2560, 9728, 36, 151_936, 0.4), (3072, 8192, 28, 128_256, 0.33), (3584, 18_944, 28, 152_064, 0.14),
    (4096, 14_336, 32, 32_000, 0.25), (4096, 14_336, 32, 128_256, 0.25), (4096, 12_288, 36, 151_936, 0.25), (5120, 13_824, 40, 32_000, 1.0),
    (5120, 17_408, 40, 151_936, 0.2),
)  # fmt: skip


def parts_of(rng: random.Random) -> list[int]:
    """Bytes of the parts of a model in 16 bits: embedding, layers, head."""
    hidden, width, layers, vocabulary, share = rng.choice(SHAPES)
    layer = 2 * int(2 * hidden * hidden * (1 + share) + 3 * hidden * width)
    embedding = 2 * vocabulary * hidden
    return [
        embedding,
        *[layer] * layers,
        2 * hidden if rng.random() < 0.4 else embedding + 2 * hidden,
    ]


class Node:
    """A pool, and the rule by which copies go: least recently used first, until the loader finds
    room.
    """

    def __init__(self, path: Path, seed: int, leases: int) -> None:
        self.rng = random.Random(seed)
        self.pool = HostPool.open(path, POOL_BYTES, ManualClock())
        self.leases = leases
        self.models = [parts_of(self.rng) for _ in range(MODELS)]
        self.used: list[int] = []
        self.evicted = self.extra = self.fetched = 0
        self.worst = 0.0

    def fetch(self) -> None:
        """A model is wanted: often one of a few, whole or a stage of it."""
        number = min(int(self.rng.expovariate(1 / 12)), MODELS - 1)
        sizes, digest = self.models[number], Digest(f"{number:064x}")
        start, stop = 0, len(sizes)
        if self.rng.random() < 0.3:
            start, stop = sorted(self.rng.sample(range(len(sizes) + 1), 2))
        wanted = {
            part: sizes[part] for part in range(start, stop) if self.pool.find(digest, part) is None
        }
        self.used = [other for other in self.used if other != number] + [number]
        unit = self.pool.geometry.unit_bytes
        need = sum(-(-size // unit) * unit for size in wanted.values())
        while self.pool.free_bytes < need and self.evict():
            self.evicted += 1
        assert self.pool.free_bytes >= need
        while not self.pool.fits(digest, wanted):
            self.worst = max(self.worst, 1 - need / self.pool.free_bytes)
            assert self.evict(), "there is nothing left to evict"
            self.extra += 1
        for part, size in sorted(wanted.items()):
            # What fits is reserved without an error.
            image = self.pool.reserve(digest, part, size, 1)
            self.pool.enter_chunk(image, (0, size), digest)
        self.fetched += bool(wanted)

    def evict(self) -> bool:
        free = self.used[: -1 - self.leases]
        if not free:
            return False
        self.used.remove(free[0])
        assert self.pool.drop(Digest(f"{free[0]:064x}"))
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "leases"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_free_bytes_stay_close_enough_together(tmp_path: Path, seed: int, leases: int):
    node = Node(tmp_path / "pool", seed, leases)
    for _ in range(FETCHES):
        node.fetch()
    assert node.worst < BOUND
    assert node.extra <= EXTRA * node.evicted
    assert node.evicted > FETCHES / 3, "the pool was never full"
    for number in node.used:
        node.pool.drop(Digest(f"{number:064x}"))
    assert node.pool.free_bytes == node.pool.largest_free_bytes == POOL_BYTES
    node.pool.close(remove=True)
