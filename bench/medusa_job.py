"""One process of ``bench/medusa.py``: a line of JSON.

``python medusa_job.py WAY SHAPE FOLDER``: the way is ``record``, or one of ``medusa.py``'s that an
engine of ours goes; FOLDER has what ``record`` of that shape wrote.

When the clock starts, torch is imported, the device has its context, and the engine has run a small
model, as a worker's has. The weights lie in pinned memory of the host.
"""

import ctypes
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.native.graphs import record_images

if __name__ == "__main__" and sys.argv[1] == "record":
    # Before the first kernel is loaded.
    record_images()
    STORE.noting = True

import torch
from engine_gpu_weights import spec_of
from materialize_job import INSTANCE, Capturing, Model, record, restored
from medusa_shapes import PAPER_GIB, PAPER_NODES

from pilotlight.common.messages.codec import decode_json
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.cuda.graphs import SIZES, GraphSet, HasSteps
from pilotlight.engine.cuda.kernels.caching import install
from pilotlight.engine.cuda.recording import GraphRecorder
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.policy.ids import RequestId
from pilotlight.policy.materialized import GraphLayout
from pilotlight.policy.model import Stage
from pilotlight.policy.request import Sampling
from pilotlight.worker.engine_child.warmup import CUDA_PROBE, warm_up

STEP_TOKENS = 8192
"""Of a forward pass, at most: what is profiled."""
PAIRS, SERVED_ROWS, CONTEXT_TOKENS = 5, 8, 512
"""Of ``serving``: rounds, requests that are served, tokens of each that are in the cache."""
TIMED_ROWS, UNTIMED_STEPS, TIMED_STEPS, PREFILL_TOKENS = (1, 16), 3, 30, 1024
READY_S = 30.0
Told = dict[str, Any]


class Stopwatch:
    """Seconds of stages, one after the other; each ends when the device is through."""

    def __init__(self) -> None:
        self.began_s = self._at_s = time.perf_counter()
        self.told: Told = {}

    def stage(self, name: str) -> None:
        """The stage that has just ended."""
        torch.cuda.synchronize()
        now_s = time.perf_counter()
        self.told[f"{name}_s"] = now_s - self._at_s
        self._at_s = now_s

    def total(self) -> Told:
        """All stages are through."""
        return {**self.told, "total_s": self._at_s - self.began_s}


class Counting(GraphRecorder):
    """A recorder that says how many nodes its graphs have."""

    graph_set: GraphSet | None = None

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        super().begin(stage, graphs)
        self.graph_set = graphs

    def nodes(self) -> list[int]:
        """Of each decode step's graph, by the driver's word."""
        driver = ctypes.CDLL("libcuda.so.1")
        found: list[int] = []
        assert self.graph_set is not None
        for kind, graph in self.graph_set.graphs.items():
            if kind.prompt:
                continue
            assert isinstance(graph, torch.cuda.CUDAGraph)
            count = ctypes.c_size_t()
            handle = ctypes.c_void_p(graph.raw_cuda_graph())
            if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
                raise SystemExit("the driver does not say a graph's nodes")
            found.append(count.value)
        return found


def recorded(shape: str, folder: Path) -> Told:
    """What the other ways restore, and how many nodes the 35 graphs have (Table 1)."""
    plan = Counting()
    told = record(shape, folder, plan)
    nodes = plan.nodes()
    assert len(nodes) == len(SIZES)
    return {
        **told,
        "nodes": sum(nodes),
        "paper_nodes": PAPER_NODES.get(shape, 0),
        "gib": spec_of(shape).total_bytes / (1 << 30),
        "paper_gib": PAPER_GIB.get(shape, 0.0),
    }


def warm(shape: str) -> Model:
    """A model that is to come to an engine that works."""
    model = Model(shape)
    warm_up(model.engine, CUDA_PROBE)
    torch.cuda.synchronize()
    return model


def plain(shape: str) -> Told:
    """Nothing is materialized, and one stage follows the other: room, weights, a pass of the most
    tokens that tells how much memory is left for KV, all steps run once and captured.
    """
    model, plan = warm(shape), Capturing()
    watch = Stopwatch()
    model.begin(plan)
    watch.stage("init")
    model.place()
    watch.stage("weights")
    most = model.spec.max_context_tokens - 2
    for number in range(STEP_TOKENS // model.spec.max_context_tokens):
        prompt = [(7919 * (place + number)) % model.spec.vocab_size for place in range(most)]
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True)
        model.engine.add(RequestId(f"profile-{number}"), 1, INSTANCE, prompt, (), sampling)
    while model.engine.has_work:
        model.engine.step()
    free_bytes, _ = torch.cuda.mem_get_info()
    watch.stage("profile")
    assert plan.steps is not None
    for stage in ("warm_up", "capture"):  # the first run of each is eager, the second captures it
        for rows in SIZES:
            plan.steps.steps_of().trial(rows)
        watch.stage(stage)
    return {**watch.total(), "free_bytes": free_bytes}


def first_layer(shape: str) -> Told:
    """MEDUSA's order, as far as our engine goes it: room for KV first, then the first layer is run
    and captured for each batch size while the weights come. What it does then, which is to build
    the graphs, is not in it.
    """
    model, plan = warm(shape), Capturing()
    watch = Stopwatch()
    model.begin(plan)
    watch.stage("init")
    rest = first_parts(model, watch)
    began_s = time.perf_counter()
    assert isinstance(plan.steps, CudaRangeRunner)
    for rows in SIZES:
        batch, inputs = step_of(rows, 1, model.spec.vocab_size)
        for _ in range(2):
            plan.steps.run(batch, inputs, Stage(0, 1))
    torch.cuda.current_stream().synchronize()
    trigger_s = time.perf_counter() - began_s
    rest.join()
    watch.stage("weights_and_trigger")
    return {**watch.total(), "trigger_s": trigger_s}


def place_rest(model: Model) -> None:
    """All parts but the first layer's and those before it; for a thread of its own."""
    torch.cuda.set_device(0)  # the thread has the device's context
    for part in model.parts[2:]:
        model.engine.place_part(INSTANCE, part, model.sources(part))


def first_parts(model: Model, watch: Stopwatch) -> threading.Thread:
    """The first layer's parts and those before it, placed; what places the others meanwhile."""
    for part in (0, 1):
        model.engine.place_part(INSTANCE, part, model.sources(part))
    watch.stage("first_weights")
    rest = threading.Thread(target=place_rest, args=(model,), name="weights")
    rest.start()
    return rest


def ours(shape: str, folder: Path) -> Told:
    """Compiled kernels and graphs come from an artifact, the graphs while the weights come."""
    model = warm(shape)
    plan = restored(shape, folder)
    watch = Stopwatch()
    install()
    STORE.restore((folder / f"{shape}.kernels").read_bytes())
    watch.stage("kernels")
    model.begin(plan)
    watch.stage("init")
    model.place()
    watch.stage("weights")
    plan.wait()
    watch.stage("graphs_left")
    told = watch.total()
    told |= {"first_graph_s": plan.first_ms / 1e3, "all_graphs_s": plan.all_ms / 1e3}
    plan.prove()
    took = plan.took.steps  # the thread has said all by now
    rebuild_ms = sum(took[f"all_{part}"] for part in ("nodes", "instantiate", "upload"))
    told |= {"rebuild_s": rebuild_ms / 1e3, "images_s": took["all_images"] / 1e3}
    model.ask()
    at_s = model.answer()
    return {
        **told,
        "proved": plan.news.proved,
        "tokens": len(at_s),
        "compiled": len(STORE.compiled),
    }


class Served(RestoredGraphs):
    """Graphs that begin to come when the gate opens."""

    def __init__(self, layout: GraphLayout, archive: bytes) -> None:
        self.gate = threading.Event()
        self.count = len(layout.digests)

        def read() -> bytes:
            self.gate.wait()
            return archive

        super().__init__(layout, read, rest_s=0.0, uses={SERVED_ROWS: 1})
        self.steps: HasSteps | None = None

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        self.steps = stage
        super().begin(stage, graphs)


def serving(shape: str, folder: Path) -> Told:
    """Decode steps of eight requests while the other graphs are made, and as many without that, in
    turns: ratios of medians and of 90th percentiles.
    """
    model = warm(shape)
    layout = decode_json((folder / f"{shape}.json").read_bytes(), GraphLayout)
    archive = (folder / f"{shape}.graphs").read_bytes()
    pairs = [served(model, Served(layout, archive)) for _ in range(PAIRS)]
    medians = [statistics.median(beside) / statistics.median(alone) for beside, alone in pairs]
    high = [p90(beside) / p90(alone) for beside, alone in pairs]
    return {
        "median_ratio": statistics.median(medians),
        "p90_ratio": statistics.median(high),
        "worst_median_ratio": max(medians),
        "worst_p90_ratio": max(high),
        "step_ms": statistics.median(pairs[0][1]),
        "steps": statistics.median(len(beside) for beside, _ in pairs),
    }


def served(model: Model, plan: Served) -> tuple[list[float], list[float]]:
    """Milliseconds of the steps beside a restore, and of as many after it."""
    model.begin(plan)
    model.place()
    assert isinstance(plan.steps, CudaRangeRunner)
    batch, inputs = step_of(SERVED_ROWS, CONTEXT_TOKENS, model.spec.vocab_size)
    plan.gate.set()
    until_s = time.perf_counter() + READY_S
    while not plan.news.proved:
        plan.steps.run(batch, inputs)  # waits for its graph, and proves it
        if plan.news.refused or time.perf_counter() > until_s:
            raise SystemExit(f"graphs are not restored: {plan.news}")
    beside = steps_ms(plan.steps, batch, inputs, lambda: plan.news.ready < plan.count)
    left = iter(range(len(beside)))
    alone = steps_ms(plan.steps, batch, inputs, lambda: next(left, None) is not None)
    if plan.news.refused or not beside:
        raise SystemExit(f"nothing was made beside steps: {plan.news}")
    model.engine.unload(INSTANCE)
    return beside, alone


class NoGraphs:
    """A ``GraphPlan`` by which every step runs eagerly, and its ``GraphSupplier``."""

    def __init__(self) -> None:
        self.steps: HasSteps | None = None

    def supplier(self, memory: StageMemory, scratch: Scratch) -> "NoGraphs":
        """See ``GraphPlan``."""
        return self

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``."""
        self.steps = stage

    def supply(self, kind: object, step: object, output: object) -> None:
        """See ``GraphSupplier``."""

    def expect(self, tokens: int) -> bool:
        """See ``GraphSupplier``."""
        return False

    def extended(self) -> None:
        """See ``GraphSupplier``."""

    def arriving(self, requests: int) -> None:
        """See ``GraphSupplier``."""

    def sampled(self) -> None:
        """See ``GraphSupplier``."""

    def close(self) -> None:
        """See ``GraphSupplier``."""


def steps(shape: str) -> Told:
    """What steps of one and of 16 requests take, eagerly and as graphs (Figure 3), and a prompt."""
    model, told = warm(shape), Told()
    plans: tuple[tuple[str, NoGraphs | Capturing], ...] = (
        ("eager", NoGraphs()),
        ("graph", Capturing()),
    )
    for name, plan in plans:
        model.begin(plan)
        model.place()
        runner = plan.steps
        assert isinstance(runner, CudaRangeRunner)
        for rows in TIMED_ROWS:
            batch, inputs = step_of(rows, CONTEXT_TOKENS, model.spec.vocab_size)
            left = iter(range(UNTIMED_STEPS + TIMED_STEPS))
            times_ms = steps_ms(
                runner, batch, inputs, lambda left=left: next(left, None) is not None
            )
            told[f"{name}_{rows}_s"] = statistics.median(times_ms[UNTIMED_STEPS:]) / 1e3
        blocks = tuple(range(PREFILL_TOKENS // BLOCK_TOKENS))
        prompt = torch.arange(PREFILL_TOKENS) % model.spec.vocab_size
        left = iter(range(5))
        batch = Batch((Segment(0, PREFILL_TOKENS, blocks, True),))
        times_ms = steps_ms(runner, batch, prompt, lambda left=left: next(left, None) is not None)
        told[f"{name}_prefill_s"] = min(times_ms) / 1e3
        model.engine.unload(INSTANCE)
    return {**told, "prefill_tokens": PREFILL_TOKENS}


def steps_ms(
    steps: CudaRangeRunner, batch: Batch, inputs: torch.Tensor, goes_on: Callable[[], bool]
) -> list[float]:
    """Of each step, until the device is through with it."""
    found: list[float] = []
    while goes_on():
        began_s = time.perf_counter()
        steps.run(batch, inputs)
        torch.cuda.current_stream().synchronize()
        found.append((time.perf_counter() - began_s) * 1e3)
    return found


def p90(times_ms: list[float]) -> float:
    """Their 90th percentile."""
    return sorted(times_ms)[int(0.9 * (len(times_ms) - 1))]


def step_of(rows: int, context: int, vocab_size: int) -> tuple[Batch, torch.Tensor]:
    """The next token of so many requests, each of so many tokens. All have the same blocks of the
    cache: only times are looked at.
    """
    table = tuple(range(-(-context // BLOCK_TOKENS)))
    segments = tuple(Segment(context - 1, 1, table, True) for _ in range(rows))
    return Batch(segments), torch.tensor([(7919 * row) % vocab_size for row in range(1, rows + 1)])


def main() -> None:
    """Runs the one that is asked for."""
    way, shape, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.zeros(1, device="cuda")
    if way == "record":
        install()
    ways: dict[str, Callable[[], Told]] = {
        "record": lambda: recorded(shape, folder),
        "plain": lambda: plain(shape),
        "plain-cold": lambda: plain(shape),
        "first-layer": lambda: first_layer(shape),
        "ours": lambda: ours(shape, folder),
        "serving": lambda: serving(shape, folder),
        "steps": lambda: steps(shape),
    }
    print(json.dumps(ways[way]()))
    sys.stdout.flush()
    os._exit(0)  # what the arena holds ends with the process


if __name__ == "__main__":
    main()
