"""A process that captures two graphs over the fake driver, as an engine's does on a device, and
what recorders write down of it: for tests of recordings on machines without a GPU.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from fake_cuda import MIB, fake_cuda
from graph_archives import ImageMaker, form_notes
from graph_driver import Driver
from random_models import spec_of
from recorders import EXTRA_BYTES, Shifted

from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.indirect import stage_allocations
from pilotlight.engine.cuda.recording import GraphRecorder
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.models.registry import decoder_of
from pilotlight.native.graphs import GraphDump, add_image, dump_graphs
from pilotlight.policy.model import Dtype

SLOT_BYTES = 64 << 30
OURS, THEIRS, HERE = 0x6100_0000_0000, 0x5200_0000_0000, 0x4300_0000_0000
NAME, OTHERS = "kernel_of_pointers", ("unused", "unused_too")
LOOKS_LIKE_ONE = OURS + 4096
"""A constant, in every process."""
SEGMENT = 2 * MIB


class OfTheFake(GraphRecorder):
    """Has its graphs from one who calls the fake driver."""

    dump: GraphDump

    def _dump(self, memory: object, steps: object, sizes: object) -> GraphDump:
        return self.dump


class FakeRecorder(Shifted, OfTheFake):
    """What writes down allocations and addresses is the true one."""


class Process:
    """One with an arena and a stage, which captures two graphs in what torch takes.

    ``busy``: others take memory of the pool besides, before the first capture and between the two.
    ``stale``: what the stack had where no kernel reads.
    """

    def __init__(self, address: int, slot: int, *, busy: bool = False, stale: int = 0) -> None:
        fake = fake_cuda()
        self.arena = CudaArena(
            0,
            driver=fake.path,
            device=torch.device("cpu"),
            num_slots=2,
            slot_bytes=SLOT_BYTES,
            addresses=(address,),
        )
        spec = spec_of("llama", Dtype.BFLOAT16)
        self.memory = StageMemory(self.arena, decoder_of(spec), spec.whole, spec.dtype, slot)
        self.graphs = self.arena.graph_pool(slot)
        self.pool = self.graphs.memory
        self.driver = Driver(ctypes.CDLL(fake.path))
        image = ImageMaker([NAME, *OTHERS], notes=form_notes((8, 8, 8), 128)).image()
        self.function = self.driver.load(image, NAME)
        add_image(image, self.function)
        self.stale, self.busy = stale, busy
        self.held = [self.pool.take(SEGMENT)]
        self.logits = self.held[0]
        self.extra: set[tuple[int, int]] = set()
        self.take_extra(0)
        self.parameter = stage_allocations(self.memory)[1].address + 64
        self.whole = b""
        """What was recorded, with all kernels of its images."""

    def take_extra(self, capture: int) -> None:
        if self.busy:
            self.held.append(self.pool.take(EXTRA_BYTES))
            self.extra.add((self.held[-1], capture))

    def graph(self, first: int, second: int) -> int:
        """Two kernels: each writes to its first parameter."""
        graph = self.driver.graph()
        rows = (first + 128, self.parameter, LOOKS_LIKE_ONE), (self.logits, second + 64, self.stale)
        before: tuple[int, ...] = ()
        for row in rows:
            params = b"".join(word.to_bytes(8, "little") for word in row)
            before = (self.driver.kernel(graph, self.function, params, before=before),)
        return graph

    def record(self, witness: bytes | None = None, **changes: Any) -> bytes:
        """What the recorder writes down: the second capture takes what lies where a segment of the
        first one did, as in MEDUSA's Figure 6, unless others took that.
        """
        recorder: Any = FakeRecorder(witness)
        recorder._scratch = SimpleNamespace(graphs=self.graphs)
        recorder._tags, recorder._counts = [8, 4], [len(self.pool.events)]
        gone, kept = self.pool.take(SEGMENT), self.pool.take(SEGMENT)
        recorder._counts.append(len(self.pool.events))
        self.pool.give(gone)
        self.take_extra(2)
        again = self.pool.take(SEGMENT)
        recorder._counts.append(len(self.pool.events))
        recorder.extra = self.extra
        assert (again == gone) != self.busy
        self.held += [kept, again]
        graphs = {8: self.graph(kept, kept), 4: self.graph(again, kept)}
        if changes.get("orphan"):
            graphs[8] = self.graph(gone, kept)
        if changes.get("permanent"):
            recorder._permanent = {kept}
            first = self.memory.graph_pool_bytes(1).data_ptr()
            recorder._kept = torch.arange(4 * SEGMENT, dtype=torch.int64).to(torch.uint8)
            assert kept - first == 2 * SEGMENT
        recorder.dump = dump_graphs(graphs, self.arena.native_arena)
        self.whole = dump_graphs(graphs, self.arena.native_arena, prune=False).archive
        return recorder._dump(self.memory, None, (8, 4)).archive

    def close(self) -> None:
        for address in self.held:
            self.pool.give(address)
        self.graphs.close()
        self.memory.close()
        self.arena.close()
