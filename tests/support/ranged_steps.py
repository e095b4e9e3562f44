"""Captured steps of ranges of a small model's layers on a device, in a process of their own:
recorded by one process that has the whole model, restored by another that has the range alone.

``python ranged_steps.py record FOLDER`` or ``restore FOLDER WAY`` prints one line of JSON.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] == "record":
    # Before the first kernel is loaded.
    record_images()

import torch
from random_models import random_parts, source_of, spec_of, with_sizes
from restored_steps import NUM_BLOCKS, POISON, SLOT, TURNS, NoGraphs, step_of

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.compute import GraphPlan, compute_on
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.graphs import SIZES
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.cuda.recording import GraphRecorder
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.errors import RestoreFailed
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.coldstart.cuts import even_stages
from pilotlight.policy.materialized import GraphLayout
from pilotlight.policy.model import Dtype, ModelSpec
from pilotlight.policy.model import Stage as Layers

KINDS = ("llama", "qwen2")
"""Plain, with windows and biases."""
LAYERS = 4


def spec_with_quarters(kind: str) -> ModelSpec:
    """A small model with a layer for each quarter."""
    return with_sizes(replace(spec_of(kind, Dtype.BFLOAT16), num_layers=LAYERS))


def ranges_of(spec: ModelSpec) -> tuple[Layers, ...]:
    """Both halves, and quarters: with the embedding, with neither, with the head."""
    quarters = even_stages(spec, 4)
    return (*even_stages(spec, 2), quarters[0], quarters[1], quarters[3])


class RangeStage:
    """Some layers of a model in place, and their steps."""

    def __init__(
        self, arena: CudaArena, spec: ModelSpec, layers: Layers, plan: GraphPlan | None
    ) -> None:
        self.spec, self.vocab_size = spec, spec.vocab_size
        self._parts = dict(enumerate(random_parts(spec, 1)))
        self.memory = StageMemory(arena, decoder_of(spec), layers, spec.dtype, SLOT)
        self._parameters = Parameters(self.memory)
        self._place(self.memory.parts)
        self.kv = KvCache(self.memory, NUM_BLOCKS)
        self.compute = compute_on(self.memory, self._parameters, self.kv, plan)

    def _place(self, parts: Any) -> None:
        for part in parts:
            tensors = {name: source_of(tensor) for name, tensor in self._parts[part].items()}
            self._parameters.place(part, tensors, lambda: 0.0)

    def grow(self) -> None:
        """It becomes the whole model, in place."""
        had = self.memory.parts
        self.kv.extend(self.spec.whole)
        self.compute.extended()
        self._place(part for part in self.memory.parts if part not in had)

    def digests(self, layers: Layers, poison_bytes: int = 0) -> Iterator[tuple[str, str]]:
        """What every size of a range gives for fresh inputs, the cache of its layers filled with
        what depends on turn, size and layer alone.
        """
        for turn in TURNS:
            for rows in SIZES:
                batch, tokens = step_of(rows, turn, self.vocab_size)
                inputs = self._inputs(layers, tokens, 1000 * turn + rows, poison_bytes)
                yield f"{turn} {rows}", digest_of(self.compute.runner.run(batch, inputs, layers))
            for length in LENGTHS:
                start, count = 11 * turn, length - turn
                ids = [(7919 * (row + 1) * turn) % self.vocab_size for row in range(count)]
                table = tuple(range(blocks_for(start + count)))
                batch = Batch((Segment(start, count, table, True),))
                seed = 7000 * turn + length
                inputs = self._inputs(layers, torch.tensor(ids), seed, poison_bytes)
                found = self.compute.runner.run(batch, inputs, layers)
                yield f"{turn} prompt {length}", digest_of(found)

    def _inputs(
        self, layers: Layers, tokens: torch.Tensor, seed: int, poison_bytes: int
    ) -> torch.Tensor:
        """Of a step, once the cache is filled and the graph pool poisoned."""
        generator = torch.Generator("cuda")
        for layer in range(layers.start, layers.stop):
            generator.manual_seed(100_000 * layer + seed)
            for stored in self.kv.stored(layer):
                stored.normal_(0, 1, generator=generator)
        if poison_bytes:
            self.memory.graph_pool_bytes(poison_bytes).fill_(POISON)
        if layers.start == 0:
            return tokens
        generator.manual_seed(seed)
        shape, dtype = (len(tokens), self.spec.hidden_size), TORCH_DTYPES[self.spec.dtype]
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    def close(self) -> None:
        self.compute.close()
        self.memory.close()


def name_of(layers: Layers) -> str:
    """Of a range, in files and in what is told."""
    return f"{layers.start}-{layers.stop}"


def record(folder: Path) -> dict[str, Any]:
    """Records the whole model and its ranges, of each kind; what captured and eager steps give."""
    arena, told = CudaArena(0), {}
    for kind in KINDS:
        spec, recorder = spec_with_quarters(kind), GraphRecorder()
        stage = RangeStage(arena, spec, spec.whole, recorder)
        layouts: dict[str, GraphLayout] = {}
        facts: dict[str, Any] = {}
        every = (spec.whole, *ranges_of(spec))
        for layers in every:
            made = recorder.record(layers)
            layouts[name_of(layers)] = made.layout
            (folder / f"{kind}.{name_of(layers)}.graphs").write_bytes(made.archive)
            facts[name_of(layers)] = {
                "archive_bytes": len(made.archive),
                "pool_bytes": made.layout.pool_bytes,
                "prompts_refused": made.layout.prompts_refused,
            }
        (folder / f"{kind}.json").write_bytes(encode_json(layouts))
        captured = {name_of(layers): dict(stage.digests(layers)) for layers in every}
        stage.close()
        eager = RangeStage(arena, spec, spec.whole, NoGraphs())
        eagerly = {name_of(layers): dict(eager.digests(layers)) for layers in every}
        eager.close()
        told[kind] = {"captured": captured, "eager": eagerly, "facts": facts}
    return told


class Folder:
    """What was recorded of a kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        data = (folder / f"{kind}.json").read_bytes()
        self.layouts = decode_json(data, dict[str, GraphLayout])

    def plan(
        self, layers: Layers, recorded: Layers | None = None, **options: Any
    ) -> RestoredGraphs:
        """Restores what was recorded of a range; of ``recorded``, if that is another one."""
        name = name_of(recorded or layers)
        layout = self.layouts[name]
        if options.pop("other_digests", False):
            layout = replace(
                layout, trials=tuple(replace(one, digest="0" * 64) for one in layout.trials)
            )
        archive = self._folder / f"{self._kind}.{name}.graphs"
        return RestoredGraphs(layout, archive.read_bytes, layers=layers, **options)


def restore(folder: Path, way: str) -> dict[str, Any]:
    """Restores ranges in one of these ways.

    * ``ranges``: each of them, in a stage of its own
    * ``grown``: the first half, which then becomes the whole model
    * ``foreign``: the second half has the graphs of the first
    * ``trial``: another digest was recorded
    """
    arena, told = CudaArena(0), {}
    for kind in KINDS if way in ("ranges", "grown") else KINDS[:1]:
        spec, files = spec_with_quarters(kind), Folder(folder, kind)
        first, second, *_ = ranges_of(spec)
        if way == "ranges":
            for layers in ranges_of(spec):
                told[f"{kind} {name_of(layers)}"] = _one(
                    arena, spec, layers, files.plan(layers), files
                )
        elif way == "grown":
            told[kind] = _grown(arena, spec, first, files)
        elif way == "foreign":
            told[kind] = _one(arena, spec, second, files.plan(second, first), files)
        else:
            told[kind] = _one(arena, spec, second, files.plan(second, other_digests=True), files)
    return told


def _one(
    arena: CudaArena, spec: ModelSpec, layers: Layers, plan: RestoredGraphs, files: Folder
) -> dict[str, Any]:
    stage = RangeStage(arena, spec, layers, plan)
    found: dict[str, str] = {}
    failed = ""
    try:
        # Of graphs that are refused the pool has no such memory.
        poison_bytes = 0 if plan.news.refused else files.layouts[name_of(layers)].pool_bytes
        found.update(stage.digests(layers, poison_bytes))  # as many as it comes to
    except RestoreFailed as error:
        failed = error.message
    told = _told(plan, found, failed)
    if not failed:
        stage.close()
        told["physical_after"] = arena.physical_bytes
    return told


def _grown(arena: CudaArena, spec: ModelSpec, first: Layers, files: Folder) -> dict[str, Any]:
    whole = files.plan(spec.whole, later=True)
    plan = files.plan(first, behind=whole)
    stage = RangeStage(arena, spec, first, plan)
    pool_bytes = files.layouts[name_of(spec.whole)].pool_bytes
    ranged = dict(stage.digests(first, pool_bytes))
    before = plan.news
    stage.grow()
    after = dict(stage.digests(spec.whole, pool_bytes))
    again = dict(stage.digests(first, pool_bytes))
    told = _told(plan, after, "")
    told |= {"ranged": ranged, "again": again, "before": [before.ready, before.proved]}
    stage.close()
    told["physical_after"] = arena.physical_bytes
    return told


def _told(plan: RestoredGraphs, found: dict[str, str], failed: str) -> dict[str, Any]:
    news = plan.news
    return {
        "found": found,
        "failed": failed,
        "ready": news.ready,
        "proved": news.proved,
        "refused": news.refused,
        "message": news.message,
        "took_ms": dict(plan.took.steps),
    }


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    place = Path(sys.argv[2])
    said = {"record": record, "restore": restore}[sys.argv[1]](place, *sys.argv[3:])
    print(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # what failed half-way ends with the process
