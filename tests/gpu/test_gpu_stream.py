"""Parameters on their way to a device: right bytes, and at the bus's rate."""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pilotlight.engine.core.layout import SlotLayout
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.stream import Streamer
from pilotlight.engine.device.copying import Source
from pilotlight.policy.model import Dtype

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
Shapes = dict[str, tuple[int, ...]]
GIB = 1 << 30
POOL_BYTES, SLAB_BYTES = 4 * GIB, GIB
VOCABULARY = 151_936


def shapes_of(layers: int, hidden: int, kv: int, ffn: int, *, bias: bool) -> list[Shapes]:
    layer: Shapes = {
        "input_norm": (hidden,),
        "down": (hidden, ffn),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "post_norm": (hidden,),
        "k": (kv, hidden),
        "o": (hidden, hidden),
        "q": (hidden, hidden),
        "v": (kv, hidden),
    }
    if bias:
        layer |= {"k_bias": (kv,), "q_bias": (hidden,), "v_bias": (kv,)}
    return [
        {"embedding": (VOCABULARY, hidden)},
        *[layer] * layers,
        {"norm": (hidden,), "head": (VOCABULARY, hidden)},
    ]


MODELS = {
    "4B": shapes_of(40, 2560, 2560, 6912, bias=True),
    "8B": shapes_of(36, 4096, 1024, 12_288, bias=False),
}


@pytest.fixture(scope="module")
def pool(device: torch.device) -> Generator[memoryview]:
    """What a loader's pool is: a file in shared memory, mapped for reading; random bytes."""
    path = f"/dev/shm/pilotlight-test-{os.getpid()}"
    with open(path, "w+b") as file:
        os.unlink(path)
        file.truncate(POOL_BYTES)
        with mmap.mmap(file.fileno(), POOL_BYTES) as writable:
            whole = torch.frombuffer(writable, dtype=torch.uint8)
            generator = torch.Generator(device).manual_seed(3)
            for start in range(0, POOL_BYTES, SLAB_BYTES):
                whole[start : start + SLAB_BYTES].copy_(
                    torch.randint(
                        256, (SLAB_BYTES,), dtype=torch.uint8, device=device, generator=generator
                    )
                )
            del whole
        with (
            mmap.mmap(file.fileno(), POOL_BYTES, prot=mmap.PROT_READ) as readable,
            memoryview(readable) as view,
        ):
            yield view


@pytest.fixture(scope="module")
def arena(device: torch.device) -> Generator[CudaArena]:
    torch.zeros(1, device=device)
    made = CudaArena(0)
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.fixture(scope="module")
def pinned(
    arena: CudaArena, pool: memoryview, record_testsuite_property: Record
) -> Generator[memoryview]:
    began_s = time.perf_counter()
    for start in range(0, POOL_BYTES, SLAB_BYTES):
        arena.copier.pin(pool[start : start + SLAB_BYTES])
    record_testsuite_property(
        "pinning_s_per_gib", round((time.perf_counter() - began_s) / (POOL_BYTES / GIB), 3)
    )
    yield pool
    for start in range(0, POOL_BYTES, SLAB_BYTES):
        arena.copier.unpin(pool[start : start + SLAB_BYTES])


@dataclass(frozen=True)
class CopyRates:
    """Bytes per second of plain copies of 1 GiB, the best of five: from what torch pins, and from
    each slab of the pool.
    """

    from_torch: float
    from_slabs: list[float]

    @property
    def measured(self) -> float:
        """From the memory that parameters are in."""
        return statistics.harmonic_mean(self.from_slabs)


@pytest.fixture(scope="module")
def copy_rates(device: torch.device, pinned: memoryview) -> CopyRates:
    target = torch.empty(GIB, dtype=torch.uint8, device=device)

    def rate(source: torch.Tensor) -> float:
        assert source.is_pinned()
        took: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began_s)
        return GIB / min(took)

    whole = torch.from_dlpack(np.frombuffer(pinned, dtype=np.uint8))
    slabs = [rate(whole[start : start + SLAB_BYTES]) for start in range(0, POOL_BYTES, SLAB_BYTES)]
    return CopyRates(rate(torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(7)), slabs)


class Model:
    """A model's parts in the pool, wrapping round, and their places in a slot."""

    def __init__(
        self, arena: CudaArena, pool: memoryview, parts: list[Shapes], item_bytes: int = 2
    ) -> None:
        self.arena, self.parts = arena, parts
        self.layout = SlotLayout(
            parts,
            len(parts) - 2,
            2048,
            2,
            arena.slot_bytes,
            granule_bytes=arena.granule_bytes,
            pool_bytes=arena.pool_bytes,
        )
        self.slot = arena.open_slot()
        for part in range(len(parts)):
            self.slot.back(self.layout.part(part))
        self.sources = list(self._sources(pool, item_bytes))
        self.fills: list[float] = []
        self.num_bytes = sum(source[2].nbytes for part in self.sources for source in part.values())

    def _sources(self, pool: memoryview, item_bytes: int) -> Iterator[dict[str, Source]]:
        place = 4096
        dtype = Dtype.BFLOAT16 if item_bytes == 2 else Dtype.FLOAT32
        for shapes in self.parts:
            sizes = {name: torch.Size(shape).numel() * item_bytes for name, shape in shapes.items()}
            if place + sum(sizes.values()) + 64 * len(sizes) > len(pool):
                place = 4096
            part: dict[str, Source] = {}
            for name, size in sizes.items():
                part[name] = (dtype, shapes[name], pool[place : place + size])
                place += -(-size // 64) * 64
            yield part

    def place(self, name: str, part: int) -> torch.Tensor:
        return self.slot.tensor(
            self.layout.tensors(part)[name], self.parts[part][name], torch.bfloat16
        )

    def load(self, streamer: Streamer) -> list[float]:
        """Places everything; when the device had each part, in seconds from the start."""
        last = len(self.parts) - 1
        stored = [
            [(self.place(name, part), source) for name, source in self.sources[part].items()]
            for part in range(last + 1)
        ]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(last + 2)]
        torch.cuda.synchronize()
        events[0].record()
        began_s = time.perf_counter()
        self.fills.clear()
        for part, pairs in enumerate(stored):
            self.fills.append(sum(streamer.fill(pairs, time.perf_counter, last=part == last)))
            events[part + 1].record()
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - began_s
        ready = [events[0].elapsed_time(event) / 1e3 for event in events[1:]]
        return [*ready[:-1], max(whole_s, ready[-1])]

    def check(self, parts: range) -> None:
        for part in parts:
            for name, (dtype, shape, buffer) in self.sources[part].items():
                there = self.place(name, part)
                expected = torch.frombuffer(bytearray(buffer), dtype=torch.uint8).to(there.device)
                flat = there.view(-1)
                if dtype is Dtype.FLOAT32:
                    # Random bytes: which of the NaNs a NaN becomes is the processor's.
                    wanted = expected.view(torch.float32).bfloat16()
                    assert torch.equal(flat.isnan(), wanted.isnan()), (part, name, shape)
                    flat, wanted = flat.nan_to_num(), wanted.nan_to_num()
                    expected = wanted.view(torch.uint8)
                assert torch.equal(flat.view(torch.uint8), expected), (part, name, shape)

    def poison(self) -> None:
        for part in range(len(self.parts)):
            extent = self.layout.part(part)
            self.slot.tensor(extent.start, (extent.num_bytes,), torch.uint8).fill_(0xA5)


@pytest.mark.parametrize("size", MODELS)
def test_pinned_parts_come_at_the_buss_rate(
    arena: CudaArena, pinned: memoryview, copy_rates: CopyRates, record_property: Record, size: str
) -> None:
    model = Model(arena, pinned, MODELS[size])
    runs: list[list[float]] = []
    for _ in range(5):
        model.poison()
        runs.append(model.load(arena.copier))
    model.check(range(0, len(model.parts), 7))
    model.check(range(len(model.parts) - 1, len(model.parts)))
    model.slot.close()
    all_s = statistics.median(run[-1] for run in runs)
    share = model.num_bytes / all_s / copy_rates.measured
    record_property("gigabytes", round(model.num_bytes / 1e9, 3))
    record_property("copy_rate_gb_per_s", round(copy_rates.measured / 1e9, 2))
    record_property("copy_rates", str(copy_rates))
    record_property("fill_ms", [round(1e3 * fill, 3) for fill in model.fills])
    record_property("embedding_ready_ms", round(1e3 * statistics.median(run[0] for run in runs), 2))
    record_property(
        "first_layer_ready_ms", round(1e3 * statistics.median(run[1] for run in runs), 2)
    )
    record_property("all_ready_ms", [round(1e3 * run[-1], 2) for run in runs])
    record_property("share_of_copy_rate", round(share, 4))
    record_property("counts", str(arena.copier.counts))
    assert share >= 0.95


@pytest.mark.parametrize("num_movers", [8, 12])
def test_parts_that_are_not_pinned_come_through_the_ring(
    arena: CudaArena,
    pool: memoryview,
    copy_rates: CopyRates,
    record_property: Record,
    num_movers: int,
) -> None:
    streamer = Streamer(arena.native, arena.device, num_movers=num_movers)
    model = Model(arena, pool, MODELS["4B"])
    model.poison()
    runs = [model.load(streamer)[-1] for _ in range(3)]
    model.check(range(3))
    model.slot.close()
    assert streamer.counts.direct_bytes == 0
    record_property("all_ready_ms", [round(1e3 * run, 1) for run in runs])
    record_property(
        "share_of_copy_rate",
        round(model.num_bytes / statistics.median(runs) / copy_rates.measured, 3),
    )
    streamer.close()


def test_background_parts_leave_the_bus_to_others(
    arena: CudaArena, pinned: memoryview, copy_rates: CopyRates, record_property: Record
) -> None:
    """How long another's small copy takes while parameters stream, in the usual way and in the
    background.
    """
    model = Model(arena, pinned, MODELS["4B"])
    small = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(small, device=arena.device)
    stream = torch.cuda.Stream(priority=-1)
    for background in (False, True):
        began_s = time.perf_counter()
        waits: list[float] = []
        for part in range(1, 41):
            pairs = [
                (model.place(name, part), source) for name, source in model.sources[part].items()
            ]
            arena.copier.fill(pairs, time.perf_counter, last=False, background=background)
            asked_s = time.perf_counter()
            with torch.cuda.stream(stream):
                target.copy_(small, non_blocking=True)
            stream.synchronize()
            waits.append(1e3 * (time.perf_counter() - asked_s))
        torch.cuda.synchronize()
        name = "background" if background else "usual"
        record_property(
            f"{name}_others_wait_ms", [round(statistics.median(waits), 3), round(max(waits), 3)]
        )
        record_property(
            f"{name}_gb_per_s",
            round(
                (model.num_bytes - 2 * VOCABULARY * 5120) / (time.perf_counter() - began_s) / 1e9, 1
            ),
        )
    model.check(range(38, 40))
    model.slot.close()


def test_the_device_converts(arena: CudaArena, pinned: memoryview, record_property: Record) -> None:
    model = Model(arena, pinned, MODELS["4B"][:4], item_bytes=4)
    model.poison()
    model.load(arena.copier)
    ready = model.load(arena.copier)
    model.check(range(4))
    model.slot.close()
    record_property("gb_per_s", round(model.num_bytes / ready[-1] / 1e9, 1))
