"""One process of ``bench/materialize.py``: a line of JSON.

``python materialize_job.py WAY SHAPE FOLDER``: the way is ``record``, or one of
``materialize.py``'s; FOLDER has what ``record`` of that shape wrote.
"""

import itertools
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.native.device import DriverCalls
from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] == "record":
    # Before the first kernel is loaded.
    record_images()
    STORE.noting = True

import torch
from engine_gpu_weights import spec_of
from materialize_where import Noted, Where, named
from torch import Tensor

from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.engine.compute import GraphPlan
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import ADDRESSES, CudaArena
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.compiled import pack
from pilotlight.engine.cuda.graphs import (
    SIZES,
    GraphSet,
    GraphStep,
    GraphSupplier,
    HasSteps,
    Kind,
)
from pilotlight.engine.cuda.kernels.caching import install
from pilotlight.engine.cuda.recording import GraphRecorder
from pilotlight.engine.cuda.restored import REST_S, RestoredGraphs
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory, layout_of
from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.materialized import GraphLayout
from pilotlight.policy.model import Dtype
from pilotlight.policy.request import Sampling
from pilotlight.worker.engine_child.inbox import EARLY_PARTS
from pilotlight.worker.engine_child.warmup import CUDA_PROBE, warm_up

if TYPE_CHECKING:
    from pilotlight.engine.device.copying import Source
    from pilotlight.engine.device.parameters import Early

INSTANCE, SLOT = InstanceId("bench"), 2
KV_TOKENS = 32_768
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
DEVIATION, PATTERN_ELEMENTS = 0.02, 1 << 24
LOOK_S, READY_S = 0.0005, 60.0


class Model:
    """An engine, and a model's weights in pinned memory of the host: one tensor's bytes serve all,
    as often as they are read.
    """

    def __init__(self, shape: str, addresses: tuple[int, ...] = ADDRESSES) -> None:
        """``addresses``: where its arena may be."""
        self.spec = spec_of(shape)
        self.arena = CudaArena(addresses=addresses)
        limits = BatchLimits(step_tokens=8_192, running=256, prefix_cache=False)
        self.engine = Engine(2, time.monotonic, limits, self.arena)
        decoder = decoder_of(self.spec)
        self._shapes = [
            {decoder.stored_name(part, name): shape for name, shape in shapes.items()}
            for part in range(self.spec.num_layers + 2)
            for shapes in (decoder.stored_shapes(part),)
        ]
        generator = torch.Generator().manual_seed(5)
        pattern = torch.randn(PATTERN_ELEMENTS, generator=generator).mul_(DEVIATION)
        pattern = memoryview(pattern.bfloat16().view(torch.uint8).numpy()).cast("B")
        longest = 2 * max(
            torch.Size(shape).numel() for part in self._shapes for shape in part.values()
        )
        pieces = -(-longest // pattern.nbytes)
        self._pool = memoryview(mmap.mmap(-1, pieces * pattern.nbytes))
        for piece in range(pieces):
            self._pool[piece * pattern.nbytes : (piece + 1) * pattern.nbytes] = pattern
        self.arena.copier.pin(self._pool)

    @property
    def parts(self) -> range:
        """All of it, in the order of execution."""
        return range(self.spec.num_layers + 2)

    def begin(self, plan: GraphPlan | None, early: "Early | None" = None, slot: int = SLOT) -> None:
        """The stage has its memory; copies of the parts that come ``early`` have begun."""
        decoder, whole = decoder_of(self.spec), self.spec.whole
        layout = layout_of(self.arena, decoder, whole, Dtype.BFLOAT16)
        room = sum(layout.part(part).num_bytes for part in self.parts)
        blocks = KV_TOKENS // BLOCK_TOKENS
        room += layout.kv_bytes(blocks, self.spec.num_layers, self.arena.granule_bytes)
        self.engine.begin_load(
            INSTANCE, self.spec, whole, Dtype.BFLOAT16, room, slot=slot, plan=plan, early=early
        )

    def place(self) -> float:
        """All parts; the seconds until they are on the device."""
        began_s = time.perf_counter()
        self.place_all()
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def place_all(self) -> None:
        """All parts, as an engine's process does it whose pool has them."""
        for part in self.parts:
            behind = (part + 1, self.sources(part + 1)) if part + 1 in self.parts else None
            self.engine.place_part(INSTANCE, part, self.sources(part), behind)

    def ask(self) -> None:
        """One request comes."""
        prompt = [(7919 * place) % self.spec.vocab_size for place in range(1, PROMPT_TOKENS + 1)]
        sampling = Sampling(seed=0, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        self.engine.add(RequestId("r"), 1, INSTANCE, prompt, (), sampling)

    def answer(self, tokens: int = OUTPUT_TOKENS) -> list[float]:
        """Steps until it is answered, or has so many tokens; when each was there."""
        at_s: list[float] = []
        while self.engine.has_work and len(at_s) < tokens:
            for one in self.engine.step().produced:
                at_s += [time.perf_counter()] * len(one.token_ids)
        return at_s

    def sources(self, part: int) -> Mapping[str, "Source"]:
        """A part's tensors, as a loader offers them."""
        return {
            name: (Dtype.BFLOAT16, shape, self._pool[: 2 * torch.Size(shape).numel()])
            for name, shape in self._shapes[part].items()
        }


class Capturing:
    """A ``GraphPlan``: everything is compiled and captured before anything is answered."""

    def __init__(self) -> None:
        self.steps: HasSteps | None = None

    def supplier(self, memory: StageMemory, scratch: Scratch) -> GraphSupplier:
        """See ``GraphPlan``."""
        return CaptureOnSecondUse(memory.arena.device, scratch)

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        self.steps = stage


class Watched(RestoredGraphs):
    """Says when graphs were ready, from when the stage has its memory, in milliseconds."""

    def __init__(self, layout: GraphLayout, read: Callable[[], bytes], rest_s: float) -> None:
        self.moments: dict[str, float] = {}
        """When something was so for the first time."""
        super().__init__(layout, read, rest_s=rest_s, open_archive=partial(Noted, self.moments))
        self._count = len(layout.digests)

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """See ``GraphSupplier``: waits for a graph, and for its proof."""
        name = named(kind.size)
        self.moments.setdefault(f"{name}_asked", time.perf_counter())
        found = super().supply(kind, step, output)
        self.moments.setdefault(f"{name}_proved", time.perf_counter())
        return found

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        self._began_s = self.moments["steps"] = time.perf_counter()
        self._watch = threading.Thread(target=self._look, name="watch", daemon=True)
        self.first_ms = self.all_ms = 0.0
        super().begin(stage, graphs)
        self._watch.start()

    def wait(self) -> None:
        """Until all are ready, or none comes any more."""
        self._watch.join(READY_S)
        news = self.news
        if news.refused or news.ready != self._count:
            raise SystemExit(f"graphs are not restored: {news}")

    def _look(self) -> None:
        while not self.news.refused and not self.all_ms:
            ms = (time.perf_counter() - self._began_s) * 1e3
            ready = self.news.ready
            self.first_ms = self.first_ms or (ms if ready else 0.0)
            self.all_ms = ms if ready == self._count else 0.0
            time.sleep(LOOK_S)


def restored(shape: str, folder: Path, *, prompts: bool = True, rest_s: float = REST_S) -> Watched:
    """The plan of a shape's recorded graphs, with those of prompts or without."""
    layout = decode_json((folder / f"{shape}.json").read_bytes(), GraphLayout)
    if not prompts:
        layout = replace(layout, prompts=())
    return Watched(layout, (folder / f"{shape}.graphs").read_bytes, rest_s)


def record(shape: str, folder: Path, plan: GraphRecorder) -> dict[str, Any]:
    """Records a shape's graphs, and the kernels that they and a request need."""
    model = Model(shape)
    model.begin(plan)
    model.place()
    began_s = time.perf_counter()
    made = plan.record()
    (folder / f"{shape}.graphs").write_bytes(made.archive)
    (folder / f"{shape}.json").write_bytes(encode_json(made.layout))
    told = {
        "record_s": time.perf_counter() - began_s,
        "archive_bytes": len(made.archive),
        "prompts": len(made.layout.prompts),
        "prompts_refused": made.layout.prompts_refused,
    }
    model.ask()
    model.answer()
    entries = STORE.noted()
    kernels = pack(entries)
    (folder / f"{shape}.kernels").write_bytes(kernels)
    return {**told, "kernels": len(entries), "kernel_bytes": len(kernels)}


def restore(shape: str, folder: Path, *, beside: bool) -> dict[str, Any]:
    """Restores all graphs, alone or while the weights come; then proves each of them."""
    model, plan = Model(shape), restored(shape, folder)
    copy_s = 0.0
    model.begin(plan)
    if beside:
        copy_s = model.place()
    plan.wait()
    took_ms = {f"took_{step}": ms for step, ms in plan.took.steps.items()}
    if not beside:
        copy_s = model.place()
    plan.prove()
    return {
        "first_ms": plan.first_ms,
        "all_ms": plan.all_ms,
        "copy_ms": copy_s * 1e3,
        "proved": plan.news.proved,
        **{f"{step}_ms": ms for step, ms in took_ms.items()},
    }


def captured(shape: str) -> dict[str, Any]:
    """The weights are there: compiles, runs and captures each size."""
    model, plan = Model(shape), Capturing()
    model.begin(plan)
    model.place()
    assert plan.steps is not None
    first_ms, began_s = 0.0, time.perf_counter()
    for rows in SIZES:
        for _ in range(2):  # the first one runs eagerly
            plan.steps.steps_of().trial(rows)
        torch.cuda.synchronize()
        first_ms = first_ms or (time.perf_counter() - began_s) * 1e3
    return {"first_ms": first_ms, "all_ms": (time.perf_counter() - began_s) * 1e3}


def cold(
    shape: str,
    plan: GraphPlan | None,
    kernels: Path | None = None,
    *,
    warm: bool = False,
    looked: bool = False,
) -> dict[str, Any]:
    """One request that waits for the model: its first token, and the gaps behind it.

    Args:
        shape: the model's.
        plan: of its graphs.
        kernels: where compiled ones are; None: they are compiled.
        warm: the engine has run a small model before, as a worker's has.
        looked: tells where the threads were until the first token.
    """
    model = Model(shape)
    if warm:
        warm_up(model.engine, CUDA_PROBE)
    kernels_s = 0.0
    calls = [model.arena.driver_calls]
    began_s = time.perf_counter()
    reserved_s: list[float] = []

    class Come:
        def first(self) -> dict[int, Mapping[str, "Source"]]:
            reserved_s.append(time.perf_counter())
            calls.append(model.arena.driver_calls)
            return {part: model.sources(part) for part in model.parts[:1]}

        def come(self) -> dict[int, Mapping[str, "Source"]]:
            return {part: model.sources(part) for part in model.parts[:EARLY_PARTS]}

    where = Where()
    with where if looked else nullcontext():
        model.begin(plan, Come())
        begun_s = time.perf_counter()
        if kernels is not None:
            install()
            STORE.restore(kernels.read_bytes())
            kernels_s = time.perf_counter() - begun_s
        model.ask()
        model.place_all()
        placed_s = time.perf_counter()
        calls.append(model.arena.driver_calls)
        at_s = model.answer(1 if looked else OUTPUT_TOKENS)
    if looked:
        print(where.told(), file=sys.stderr, flush=True)
    at_s += model.answer()
    gaps_ms = sorted((after - before) * 1e3 for before, after in itertools.pairwise(at_s))
    told = {
        "ttft_ms": (at_s[0] - began_s) * 1e3,
        "tokens": len(at_s),
        "worst_gap_ms": gaps_ms[-1],
        "median_gap_ms": gaps_ms[len(gaps_ms) // 2],
        "reserved_ms": (reserved_s[0] - began_s) * 1e3,
        "begun_ms": (begun_s - began_s) * 1e3,
        "placed_ms": (placed_s - began_s) * 1e3,
    }
    told |= mapping("before", *calls[:2]) | mapping("beside", calls[1], calls[-1])
    if isinstance(plan, RestoredGraphs):
        told |= {f"took_{step}_ms": ms for step, ms in plan.took.steps.items()}
        told |= {"proved": plan.news.proved, "refused": int(bool(plan.news.refused))}
    if isinstance(plan, Watched):
        told |= {f"at_{name}_ms": (at - began_s) * 1e3 for name, at in plan.moments.items()}
    if kernels is None:
        return told
    return {
        **told,
        "kernels_ms": kernels_s * 1e3,
        "compiled": len(STORE.compiled),
        "given_up": int(bool(STORE.broken)),
    }


def mapping(when: str, start: DriverCalls, stop: DriverCalls) -> dict[str, float]:
    """What an arena asked of the driver between two moments that maps memory, and what of it took
    how long.
    """
    names = {"create": "created", "map": "mapped", "access": "access_set"}
    calls = sum(getattr(stop, name) - getattr(start, name) for name in names.values())
    spent = {
        f"{when}_{call}_ms": (getattr(stop, f"{call}_ns") - getattr(start, f"{call}_ns")) / 1e6
        for call in names
    }
    return {f"{when}_calls": calls, **spent}


def main() -> None:
    """Runs the one that is asked for."""
    way, shape, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.zeros(1, device="cuda")
    if way == "record":
        install()
    kernels = folder / f"{shape}.kernels"
    ways = {
        "record": lambda: record(shape, folder, GraphRecorder()),
        "restore": lambda: restore(shape, folder, beside=False),
        "beside": lambda: restore(shape, folder, beside=True),
        "captured": lambda: captured(shape),
        "cold": lambda: cold(shape, restored(shape, folder)),
        "cold-plain": lambda: cold(shape, None),
        "cold-kernels": lambda: cold(shape, restored(shape, folder), kernels),
        "cold-busy": lambda: cold(shape, restored(shape, folder, rest_s=0.0), kernels, warm=True),
        "cold-decode": lambda: cold(
            shape, restored(shape, folder, prompts=False), kernels, warm=True
        ),
        "cold-warm": lambda: cold(shape, restored(shape, folder), kernels, warm=True),
        "cold-where": lambda: cold(shape, restored(shape, folder), kernels, warm=True, looked=True),
    }
    print(json.dumps(ways[way]()))
    sys.stdout.flush()
    os._exit(0)  # what the arena holds ends with the process


if __name__ == "__main__":
    main()
