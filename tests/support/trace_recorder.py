"""Records what an engine's process does as a trace of allocations and launches: on a CPU, where
torch's operators are the kernels and glibc's allocator gives the addresses.

``PYTHONPATH=... python tests/support/trace_recorder.py libs/policy/tests/traces`` writes the traces
of three processes again, each with its own address space.
"""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pilotlight.common.messages.codec import encode_json
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.graphs.trace import Allocation, Capture, Launch, Param, Trace
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import Sampling
from pilotlight.worker.engine_child.warmup import CPU_PROBE

PROCESSES = 3
INSTANCE = InstanceId("traced")
ROWS = 2
"""Requests in the step that counts as captured."""


class Recorder(TorchDispatchMode):
    """Every operator of torch between enter and exit."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.rows: list[list[Any]] = []  # at, address, bytes, freed_at
        self.alive: dict[int, tuple[int, StorageWeakRef]] = {}
        self.launches: list[Launch] = []
        self.layouts: dict[str, tuple[Param, ...]] = {}
        self.captures: list[Capture] = []
        self.graph: int | None = None
        self.began = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def capture(self, graph: int | None) -> None:
        """Until the next call, what is launched belongs to a graph, or to none."""
        if self.graph is not None:
            self._note_frees()
            self.captures.append(Capture(self.graph, self.began, self.tick()))
        self.graph, self.began = graph, self.tick()

    def trace(self) -> Trace:
        allocations = [Allocation(*row) for row in self.rows]
        source = "torch's operators in decode steps of the warm-up model on a CPU"
        return Trace(
            source=source,
            layouts=self.layouts,
            allocations=allocations,
            launches=self.launches,
            captures=self.captures,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note_frees()
        # What goes in was there before what this operator makes.
        given = tree_leaves((args, kwargs or {}))
        for one in given:
            self._note(one)
        made = func(*args, **(kwargs or {}))
        words: list[int] = []
        for one in (*given, *tree_leaves(made)):
            self._note(one)
            if isinstance(one, torch.Tensor):
                words += [one.data_ptr(), one.numel()]
            elif isinstance(one, int) and not isinstance(one, bool):
                words.append(one % (1 << 64))
        kernel = f"{func}/{len(words)}"
        self.layouts[kernel] = (Param(0, 8 * len(words)),)
        parameters = b"".join(word.to_bytes(8, "little") for word in words)
        self.launches.append(Launch(self.tick(), kernel, parameters, self.graph))
        return made

    def _note(self, one: object) -> None:
        if not isinstance(one, torch.Tensor):
            return
        storage = one.untyped_storage()
        if storage.nbytes() and storage._cdata not in self.alive:
            self.alive[storage._cdata] = (len(self.rows), StorageWeakRef(storage))
            self.rows.append([self.tick(), storage.data_ptr(), storage.nbytes(), None])

    def _note_frees(self) -> None:
        for key, (number, reference) in tuple(self.alive.items()):
            if reference.expired():
                del self.alive[key]
                self.rows[number][3] = self.tick()


def recorded() -> Trace:
    """Two requests: a prompt's step and a decode step as warm-up, then one that is captured."""
    torch.set_num_threads(1)
    spec = CPU_PROBE.spec
    decoder = decoder_of(spec)
    engine = Engine(threads=1, monotonic_s=lambda: 0.0)
    engine.begin_load(INSTANCE, spec, spec.whole, Dtype.BFLOAT16, CPU_PROBE.device_bytes)
    for part in spec.parts_of(spec.whole):
        shapes = {decoder.prefix(part) + name: at for name, at in decoder.shapes(part).items()}
        sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
        engine.place_part(
            INSTANCE,
            part,
            {
                name: (Dtype.FLOAT32, shape, memoryview(bytes(sizes[name])))
                for name, shape in shapes.items()
            },
        )
    for index in range(ROWS):
        sampling = Sampling(seed=index, max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.add(RequestId(f"traced-{index}"), 0, INSTANCE, [1, 2, 3 + index], [], sampling)
    recorder = Recorder()
    with recorder:
        engine.step()
        engine.step()
        recorder.capture(ROWS)
        engine.step()
        recorder.capture(None)
        engine.step()
    return recorder.trace()


def main() -> int:
    if sys.argv[1] == "--one":
        Path(sys.argv[2]).write_bytes(gzip.compress(encode_json(recorded()), mtime=0))
        return 0
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for number in range(PROCESSES):
        target = folder / f"decode-{number}.json.gz"
        command = [sys.executable, __file__, "--one", str(target)]
        subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "0"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
