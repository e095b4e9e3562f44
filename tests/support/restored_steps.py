"""Captured steps of a small model on a device, in a process of their own: recorded by one process,
restored by another.

``python restored_steps.py record FOLDER``, ``restore FOLDER WAY`` or ``walk FOLDER KIND`` prints
one line of JSON. ``walk`` is for diagnosis: it runs every graph node by node and waits for each,
then as a launch list and as a graph, and says which one gives what.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pilotlight.native.graphs import GraphArchive, record_images, recorded_images

if __name__ == "__main__" and sys.argv[1] == "record":
    # Before the first kernel is loaded.
    record_images()

import torch
from random_models import random_parts, source_of, spec_of

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.compute import GraphPlan, compute_on
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.fitting import GraphsRefused, named
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice, GraphDevice
from pilotlight.engine.cuda.graphs import SIZES, GraphSet, HasSteps
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.cuda.recording import GraphRecorder
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.errors import RestoreFailed
from pilotlight.engine.models.registry import decoder_of
from pilotlight.native.library import NativeError
from pilotlight.policy.materialized import GraphLayout
from pilotlight.policy.model import Dtype
from pilotlight.policy.model import Stage as Layers

SLOT, OTHER_SLOT = 2, 5
TABLE_BLOCKS, TURNS = 4, (1, 2)
NUM_BLOCKS = TABLE_BLOCKS * SIZES[-1]
KINDS = ("llama", "qwen2", "qwen3")
"""Plain, with windows and biases, with norms of heads."""
POISON, LOADED_S = 0xFF, 60.0
GROWN_ROWS = (1, 8, 256)
"""Of the steps that a range runs before it is the whole model."""


class Stage:
    """A model in place, and its steps; ``grown``: it was its first layers before, and ran those."""

    def __init__(
        self,
        arena: CudaArena,
        kind: str,
        slot: int,
        plan: GraphPlan | None,
        *,
        grown: bool = False,
    ) -> None:
        spec = spec_of(kind, Dtype.BFLOAT16)
        self.num_layers, self.vocab_size = spec.num_layers, spec.vocab_size
        self._parts = dict(enumerate(random_parts(spec, 1)))
        first = Layers(0, spec.num_layers // 2) if grown else spec.whole
        self.memory = StageMemory(arena, decoder_of(spec), first, spec.dtype, slot)
        self._parameters = Parameters(self.memory)
        self._place(spec.parts_of(first))
        self.kv = KvCache(self.memory, NUM_BLOCKS)
        self.compute = compute_on(self.memory, self._parameters, self.kv, plan)
        if grown:
            self._grow(first, spec.whole)

    def _place(self, parts: Iterable[int]) -> None:
        for part in parts:
            tensors = {name: source_of(tensor) for name, tensor in self._parts[part].items()}
            self._parameters.place(part, tensors, lambda: 0.0)

    def _grow(self, first: Layers, whole: Layers) -> None:
        """The first layers run, eagerly, captured and replayed; then the others come."""
        had = self.memory.parts
        for rows in GROWN_ROWS * 3:
            batch, inputs = step_of(rows, 1, self.vocab_size)
            self.compute.runner.run(batch, inputs, first)
        self.kv.extend(whole)
        self.compute.extended()
        self._place(part for part in self.memory.parts if part not in had)

    def digests(self, poison_bytes: int = 0) -> Iterator[tuple[str, str]]:
        """What every size gives for fresh inputs, the cache filled with what depends on the turn
        alone.
        """
        generator = torch.Generator("cuda")
        for turn in TURNS:
            for rows in SIZES:
                generator.manual_seed(1000 * turn + rows)
                for layer in range(self.num_layers):
                    for stored in self.kv.stored(layer):
                        stored.normal_(0, 1, generator=generator)
                if poison_bytes:
                    self.memory.graph_pool_bytes(poison_bytes).fill_(POISON)
                batch, inputs = step_of(rows, turn, self.vocab_size)
                yield f"{turn} {rows}", digest_of(self.compute.runner.run(batch, inputs))
            for length in LENGTHS:
                yield f"{turn} prompt {length}", self._prompt(length, turn, generator, poison_bytes)

    def _prompt(self, length: int, turn: int, generator: torch.Generator, poison_bytes: int) -> str:
        """What a prompt gives behind a beginning that the cache has from its first block on."""
        generator.manual_seed(7000 * turn + length)
        for layer in range(self.num_layers):
            for stored in self.kv.stored(layer):
                stored.normal_(0, 1, generator=generator)
        if poison_bytes:
            self.memory.graph_pool_bytes(poison_bytes).fill_(POISON)
        start, count = 11 * turn, length - turn
        table = tuple(range(blocks_for(start + count)))
        tokens = [(7919 * (row + 1) * turn) % self.vocab_size for row in range(count)]
        batch = Batch((Segment(start, count, table, True),))
        return digest_of(self.compute.runner.run(batch, torch.tensor(tokens)))


def step_of(rows: int, turn: int, vocab_size: int) -> tuple[Batch, torch.Tensor]:
    """One token for each of so many requests, at positions of all kinds."""
    segments: list[Segment] = []
    for row in range(rows):
        position = (37 * row + 11 * turn) % (TABLE_BLOCKS * BLOCK_TOKENS)
        table = tuple(range(row * TABLE_BLOCKS, (row + 1) * TABLE_BLOCKS))
        segments.append(Segment(position, 1, table[: position // BLOCK_TOKENS + 1], True))
    tokens = [(7919 * (row + 1) * turn) % vocab_size for row in range(rows)]
    return Batch(tuple(segments)), torch.tensor(tokens)


def record(folder: Path) -> dict[str, Any]:
    """Records each kind's graphs; what they and eager steps give."""
    arena, told = CudaArena(0), {}
    for kind in KINDS:
        recorder = GraphRecorder()
        stage = Stage(arena, kind, SLOT, recorder)
        began_s = time.perf_counter()
        recorded = recorder.record()
        seconds = time.perf_counter() - began_s
        (folder / f"{kind}.graphs").write_bytes(recorded.archive)
        (folder / f"{kind}.json").write_bytes(encode_json(recorded.layout))
        captured = dict(stage.digests())
        stage.compute.close()
        stage.memory.close()
        # The process records images: one archive for each kind is pruned to its own kernels.
        eager = Stage(arena, kind, SLOT, NoGraphs())
        told[kind] = {
            "captured": captured,
            "eager": dict(eager.digests()),
            "record_s": round(seconds, 2),
            "archive_bytes": len(recorded.archive),
            "pool_bytes": recorded.layout.pool_bytes,
            "prompts_refused": recorded.layout.prompts_refused,
            "images": recorded_images()[0],
        }
        eager.compute.close()
        eager.memory.close()
    return told


class NoGraphs:
    """A plan by which every step runs eagerly."""

    def supplier(self, memory: object, scratch: object) -> "NoGraphs":
        return self

    def begin(self, stage: object, graphs: object) -> None: ...
    def supply(self, kind: object, step: object, output: object) -> None: ...
    def expect(self, tokens: int) -> bool:
        return False

    def extended(self) -> None: ...

    def arriving(self, requests: int) -> None: ...

    def sampled(self) -> None: ...

    def close(self) -> None: ...


def restore(folder: Path, way: str) -> dict[str, Any]:
    """Restores each kind's graphs in one of the ways below; what they give. The first that fails is
    the last: its stage holds the slot.
    """
    arena, told = CudaArena(0), {}
    for kind in KINDS if way in ("plain", "listed") else KINDS[:1]:
        HeldBack.may.clear()
        told[kind] = restore_one(arena, folder, kind, way)
        if told[kind]["failed"]:
            break
    return told


def walk(folder: Path, kind: str) -> dict[str, str]:
    """What each size's trial gives, node by node and as a graph: "same", the digest, or why not."""
    arena = CudaArena(0)
    layout = decode_json((folder / f"{kind}.json").read_bytes(), GraphLayout)

    def read() -> bytes:
        raise GraphsRefused("walk", "the pool is taken, and nothing else is wanted")

    stage = Stage(arena, kind, SLOT, RestoredGraphs(layout, read))
    archive = GraphArchive(
        arena.native, (folder / f"{kind}.graphs").read_bytes(), arena.native_arena
    )
    told: dict[str, str] = {}
    stream = torch.cuda.current_stream().cuda_stream
    ways = {
        "walk": archive.walk,
        "list": partial(_load_and_list, archive),
        "graph": partial(_build_and_launch, archive),
    }
    runner = stage.compute.runner
    assert isinstance(runner, CudaRangeRunner)
    steps = runner.steps_of()
    for size, recorded in layout.digests.items():
        for way, go in ways.items():
            name = f"{named(steps.kind_of(size))} {way}"
            try:
                stage.memory.graph_pool_bytes(layout.pool_bytes).fill_(POISON)
                with steps.trial_inputs(size):
                    torch.cuda.synchronize()
                    go(size, stream)
                    found = digest_of(steps.output(size))
            except (NativeError, RuntimeError) as error:
                told[name] = str(error)
                return told
            told[name] = "same" if found == recorded else found
    return told


def _build_and_launch(archive: GraphArchive, rows: int, stream: int) -> None:
    archive.build(rows, stream)
    archive.launch(rows, stream)


def _load_and_list(archive: GraphArchive, rows: int, stream: int) -> None:
    archive.load(rows)
    archive.launch_list(rows, stream)


class HeldBack(ArchiveOnDevice):
    """Makes no graph before it may."""

    may = threading.Event()

    def build(self, size: int, between: Callable[[], None]) -> None:
        self.may.wait()
        super().build(size, between)


class Listed(RestoredGraphs):
    """Has the kernels of every size before the stage has its steps."""

    def __init__(self, layout: GraphLayout, read: Callable[[], bytes]) -> None:
        self._all_loaded = threading.Event()
        super().__init__(layout, read, open_archive=HeldBack, launch_lists=True)

    def _prepared(self) -> GraphDevice:
        device = super()._prepared()
        self._all_loaded.set()
        return device

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        assert self._all_loaded.wait(LOADED_S)
        super().begin(stage, graphs)


def as_for_a_request(stage: Stage, plan: RestoredGraphs) -> None:
    """What is done where a request waits: a rehearsal, and trials of its graphs when these are
    ready.
    """
    plan.expect(LENGTHS[0])
    stage.compute.rehearse()
    while not plan.news.refused and plan.news.ready < 2:
        pass
    stage.compute.arriving(1)


def restore_one(arena: CudaArena, folder: Path, kind: str, way: str) -> dict[str, Any]:
    layout = decode_json((folder / f"{kind}.json").read_bytes(), GraphLayout)
    archive = bytearray((folder / f"{kind}.graphs").read_bytes())
    if way == "cut":
        del archive[-4096:]
    if way == "trial":
        others = tuple(replace(one, digest="0" * 64) for one in layout.trials)
        layout = replace(layout, trials=others)

    def read() -> bytes:
        if way == "unreadable":
            raise GraphsRefused("digest", "as the reader says")
        return bytes(archive)

    plan = (
        Listed(layout, read)
        if way == "listed"
        else RestoredGraphs(layout, read, later=way == "grown")
    )
    began_s = time.perf_counter()
    slot = OTHER_SLOT if way == "slot" else SLOT
    stage = Stage(arena, kind, slot, plan, grown=way == "grown")
    built_s = time.perf_counter() - began_s
    # Of graphs that are refused the pool has no such memory.
    whole = way in ("plain", "grown", "listed") and not plan.news.refused
    poison_bytes = layout.pool_bytes if whole else 0
    found: dict[str, str] = {}
    failed, first_s = "", 0.0
    try:
        if way == "plain":
            as_for_a_request(stage, plan)
        for name, digest in stage.digests(poison_bytes):
            first_s = first_s or time.perf_counter() - began_s
            found[name] = digest
        HeldBack.may.set()
    except RestoreFailed as error:
        failed = error.message
    news = plan.news
    told = {
        "found": found,
        "failed": failed,
        "ready": news.ready,
        "proved": news.proved,
        "listed": len(plan.lists.proved),
        "refused": news.refused,
        "message": news.message,
        "stage_s": round(built_s, 3),
        "first_s": round(first_s, 3),
        "all_s": round(time.perf_counter() - began_s, 3),
        "took_ms": dict(plan.took.steps),
    }
    if not failed:
        stage.compute.close()
        stage.memory.close()
        told["physical_after"] = arena.physical_bytes
    return told


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    place = Path(sys.argv[2])
    ways = {"record": record, "restore": restore, "walk": walk}
    said = ways[sys.argv[1]](place, *sys.argv[3:])
    print(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # what failed half-way ends with the process
