"""A tiny Llama with random weights in a file laid out as a host pool is, leases on it, and workers
and children on it.
"""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from pinned_pool import POOL_BYTES, Driver
from scripted_engine import UP, Parent, ScriptedEngine

from pilotlight.common.buckets import WORKERS
from pilotlight.common.clock import ManualClock
from pilotlight.common.messages.engine import EngineUp, LoadStage, PlacePart
from pilotlight.common.messages.pool import PartReady, TensorPlace
from pilotlight.common.phase_reports import reported_phases
from pilotlight.dataplane.pool import HostPool
from pilotlight.policy.cluster import DeviceKind, FetchPriority
from pilotlight.policy.cost import EngineSpeed
from pilotlight.policy.ids import Digest, InstanceId, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Dtype, EngineKind, Model, ModelSpec, ScalingBounds, Slo
from pilotlight.policy.request import Sampling
from pilotlight.policy.testing import tiny_spec
from pilotlight.worker.artifacts import Artifacts
from pilotlight.worker.core import WorkerCore
from pilotlight.worker.engine_child import loop, stages
from pilotlight.worker.engine_child.pins import Pins
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.client import EngineClient
from pilotlight.worker.engines.process import ProcessEngine
from pilotlight.worker.engines.sim import SimEngine
from pilotlight.worker.engines.switch import EngineSwitch
from pilotlight.worker.groups import Groups
from pilotlight.worker.loading import StageLoader
from pilotlight.worker.metrics import WorkerMetrics
from pilotlight.worker.requests import RequestTable
from pilotlight.worker.settings import WorkerSettings
from pilotlight.worker.testing import CLUSTER_KEY, FAST_S, ROOM, WORKER, MakeRig, Rig
from pilotlight.worker.vocabularies import Vocabularies
from pilotlight.worker.worker import Worker

ALIGNMENT = 64
DATA_OFFSET = 4096


@dataclass(frozen=True)
class TinyPool:
    """A file with every part of a model, and where its tensors lie."""

    path: Path
    pool_bytes: int
    model: Model
    parts: dict[int, tuple[TensorPlace, ...]]

    def load(self, instance_id: str = "inst-1", kv_tokens: int = 512) -> LoadStage:
        spec = self.model.spec
        kv_bytes = kv_tokens * spec.kv_bytes_per_token(spec.whole, self.model.dtype)
        return LoadStage(
            instance_id=InstanceId(instance_id),
            model=self.model,
            stage=spec.whole,
            device_bytes=self.model.device_bytes(spec.whole) + kv_bytes,
            pool_path=str(self.path),
        )

    def places(self, instance_id: str = "inst-1") -> list[PlacePart]:
        return [
            PlacePart(instance_id=InstanceId(instance_id), part=part, tensors=tensors)
            for part, tensors in self.parts.items()
        ]


@dataclass
class PoolLeases:
    """``PartSource`` on a ``TinyPool``: gives as many parts as ``release`` allowed, and counts open
    leases.
    """

    pool: TinyPool
    open: int = 0
    asked: list[tuple[InstanceId, tuple[int, ...], str]] = field(default_factory=list)
    priorities: list[FetchPriority] = field(default_factory=list)
    """Of each that was asked for."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    intact: bool = True
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, a load lasts after its last part."""
    before_gate: int = 0
    """Parts of a lease that a closed gate lets pass."""
    given: list[int] = field(default_factory=list)
    """Parts that came."""
    grants: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, a lease is asked for and not granted yet."""
    refusal: Exception | None = None
    """Raised in the place of a grant."""

    async def lease(
        self,
        worker_id: WorkerId,
        instance_id: InstanceId,
        model: Model,
        parts: tuple[int, ...],
        trace_parent: str = "",
        priority: FetchPriority = FetchPriority.COLD_START,
    ) -> "_OpenLease":
        self.asked.append((instance_id, parts, trace_parent))
        self.priorities.append(priority)
        await self.grants.wait()
        if self.refusal is not None:
            raise self.refusal
        return _OpenLease(self, parts)


class _OpenLease:
    @property
    def intact(self) -> bool:
        return self._leases.intact

    def __init__(self, leases: PoolLeases, parts: tuple[int, ...]) -> None:
        self.pool_path = str(leases.pool.path)
        self._leases = leases
        self._parts = parts

    async def __aenter__(self) -> "_OpenLease":
        self._leases.open += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._leases.open -= 1

    async def __aiter__(self) -> AsyncIterator[PartReady]:
        for at, part in enumerate(self._parts):
            if at >= self._leases.before_gate:
                await self._leases.gate.wait()
            if self._leases.failure is not None:
                raise self._leases.failure
            self._leases.given.append(part)
            yield PartReady(part=part, tensors=self._leases.pool.parts[part])
        try:
            await self._leases.may_end.wait()
        finally:
            await self._leases.may_end.wait()


def _shapes(spec: ModelSpec) -> dict[int, dict[str, tuple[int, ...]]]:
    hidden, wide, kv = spec.hidden_size, spec.intermediate_size, spec.num_kv_heads * spec.head_dim
    parts: dict[int, dict[str, tuple[int, ...]]] = {
        0: {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        parts[1 + layer] = {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (spec.num_heads * spec.head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, spec.num_heads * spec.head_dim),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (wide, hidden),
            prefix + "mlp.up_proj.weight": (wide, hidden),
            prefix + "mlp.down_proj.weight": (hidden, wide),
        }
    parts[spec.num_layers + 1] = {
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    return parts


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _spec(num_layers: int = 2) -> ModelSpec:
    bare = tiny_spec(num_layers=num_layers)
    sizes = tuple(
        sum(4 * prod(shape) for shape in shapes.values()) for shapes in _shapes(bare).values()
    )
    return replace(bare, part_bytes=sizes)


@pytest.fixture(scope="session")
def model() -> Model:
    return Model(
        name=ModelName("tiny"),
        uri="file:///models/tiny",
        revision=None,
        source_version="1",
        digest=Digest("a" * 64),
        text_digest=Digest("b" * 64),
        dtype=Dtype.FLOAT32,
        spec=_spec(),
        slo=Slo(ttft_ms=1000.0, tpot_ms=100.0),
        scaling=ScalingBounds(),
    )


@pytest.fixture(scope="session")
def pool(model: Model, tmp_path_factory: pytest.TempPathFactory) -> TinyPool:
    return make_pool(model, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="session")
def deep_pool(model: Model, tmp_path_factory: pytest.TempPathFactory) -> TinyPool:
    """The same model with four layers and a long context, computed in float64: no batch rounds
    otherwise than another.
    """
    spec = replace(_spec(4), max_context_tokens=8192)
    return make_pool(
        replace(model, spec=spec, dtype=Dtype.FLOAT64), tmp_path_factory.mktemp("deep")
    )


def make_pool(model: Model, folder: Path) -> TinyPool:
    """A pool with random parameters."""
    rng = random.Random(7)
    image = bytearray(DATA_OFFSET)
    parts: dict[int, tuple[TensorPlace, ...]] = {}
    for part, shapes in _shapes(model.spec).items():
        places: list[TensorPlace] = []
        for name, shape in shapes.items():
            image.extend(bytes(_aligned(len(image)) - len(image)))
            count = prod(shape)
            centre = 1.0 if "norm" in name else 0.0
            values = struct.pack(f"<{count}f", *(rng.gauss(centre, 0.3) for _ in range(count)))
            places.append(
                TensorPlace(
                    name=name,
                    dtype=Dtype.FLOAT32,
                    shape=shape,
                    offset=len(image),
                    size_bytes=len(values),
                )
            )
            image.extend(values)
        parts[part] = tuple(places)
    path = folder / "pool"
    path.write_bytes(image)
    return TinyPool(path, len(image), model, parts)


@pytest.fixture
def leases(pool: TinyPool) -> Iterator[PoolLeases]:
    """Leases that give every part at once; clear ``gate`` to hold parts back."""
    made = PoolLeases(pool)
    made.grants.set()
    made.gate.set()
    made.may_end.set()
    yield made
    assert made.open == 0, "a lease was left open"


@pytest.fixture(scope="session")
def greedy() -> Callable[[int], Sampling]:
    """Sampling of ``max_tokens`` tokens, the most likely each."""
    return lambda max_tokens: Sampling(
        seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
    )


@pytest.fixture
async def make_rig(
    make_context: Any, connect_bus: Any, leases: Any, model: Any, tmp_path: Path
) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    async def make(
        step_s: float = FAST_S,
        process: bool = False,
        max_requests: int = 8,
        pool_path: Path | None = None,
    ) -> Rig:
        context = make_context("worker", WorkerSettings())
        engine: EngineClient
        if process:
            faults = f"step={step_s}" if step_s > FAST_S else ""
            engine = ProcessEngine(
                ChildOptions(threads=1, log_path=tmp_path / "engine.log", faults=faults)
            )
        else:
            speed = EngineSpeed(
                load_bytes_per_s=1e9, prefill_tokens_per_s=1e6, decode_step_s=step_s
            )
            engine = SimEngine(speed, context.clock)
        core = WorkerCore(
            worker_id=WORKER,
            node_id=NodeId("node-1"),
            device_bytes=ROOM,
            engine=EngineSwitch({EngineKind.NATIVE: lambda: engine}, context.background),
            table=RequestTable(max_requests),
            bus=context.bus,
            clock=context.clock,
            background=context.background,
            metrics=WorkerMetrics(context.metrics),
            phases=reported_phases(context.bus, context.clock, context.background, "worker"),
            vocabularies=Vocabularies(context.store),
        )
        bucket = await context.bus.bucket(WORKERS)
        kind = DeviceKind.CPU if process else DeviceKind.SIM
        groups = Groups(core, "127.0.0.1", tmp_path)
        artifacts = Artifacts(core, context.store, CLUSTER_KEY)
        worker = Worker(
            core,
            kind,
            StageLoader(core, leases, pool_path, artifacts),
            bucket,
            context.incarnation,
            None,
            groups,
            artifacts=artifacts,
        )
        rig = Rig(worker, await connect_bus("gateway"), model)
        rigs.append(rig)
        await rig.listen()
        await worker.start()
        await rig.until(lambda: rig.facts)
        return rig

    yield make
    for rig in rigs:
        await rig.worker.stop()


@pytest.fixture
def scripted() -> ScriptedEngine:
    """The engine of ``start_child``."""
    return ScriptedEngine()


@pytest.fixture
def start_child(scripted: ScriptedEngine) -> Iterator[Callable[..., Parent]]:
    """Starts a child's loop in a thread."""
    parents: list[Parent] = []

    def make(faults: str = "", pins: Pins | None = None) -> Parent:
        parents.append(Parent(scripted, faults, pins))
        assert parents[-1].until(EngineUp) == UP
        return parents[-1]

    yield make
    for parent in parents:
        parent.close()


@pytest.fixture
def work_alone(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Time passes by computations and injected delays alone, so that phases can be told to the
    microsecond.
    """
    clock = scripted.clock = ManualClock()
    for module in (loop, stages):
        monkeypatch.setattr(module, "pause_blocking", clock.advance)
    return clock


# What is pinned of a host pool.


@pytest.fixture
def clock() -> ManualClock:
    """Of what is pinned, and when."""
    return ManualClock()


@pytest.fixture
def host(tmp_path: Path, clock: ManualClock) -> Iterator[HostPool]:
    """The pool, as its loader has it."""
    pool = HostPool.open(tmp_path / "host", POOL_BYTES, clock)
    yield pool
    pool.close(remove=True)


@pytest.fixture
def driver() -> Driver:
    """It pins, and is no device."""
    return Driver()
