"""A tiny Llama with random weights in a file laid out as a host pool is, and leases on it."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import pytest

from pilotlight.common.messages.engine import LoadStage, PlacePart
from pilotlight.common.messages.pool import PartReady, TensorPlace
from pilotlight.policy.types import (
    Digest,
    Dtype,
    InstanceId,
    Model,
    ModelName,
    ModelSpec,
    Sampling,
    ScalingBounds,
    Slo,
    WorkerId,
)

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
            PlacePart(instance_id=InstanceId(instance_id), part=part, tensors=tensors) for part, tensors in self.parts.items()
        ]


@dataclass
class PoolLeases:
    """``PartSource`` on a ``TinyPool``: gives as many parts as ``release`` allowed, and counts open leases."""

    pool: TinyPool
    open: int = 0
    asked: list[tuple[InstanceId, tuple[int, ...], str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    intact: bool = True
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, a load lasts after its last part."""

    async def lease(
        self, worker_id: WorkerId, instance_id: InstanceId, model: Model, parts: tuple[int, ...], trace_parent: str = ""
    ) -> "_OpenLease":
        self.asked.append((instance_id, parts, trace_parent))
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
        for part in self._parts:
            await self._leases.gate.wait()
            if self._leases.failure is not None:
                raise self._leases.failure
            yield PartReady(part=part, tensors=self._leases.pool.parts[part])
        try:
            await self._leases.may_end.wait()
        finally:
            await self._leases.may_end.wait()


def _shapes(spec: ModelSpec) -> dict[int, dict[str, tuple[int, ...]]]:
    hidden, wide, kv = spec.hidden_size, spec.intermediate_size, spec.num_kv_heads * spec.head_dim
    parts: dict[int, dict[str, tuple[int, ...]]] = {0: {"model.embed_tokens.weight": (spec.vocab_size, hidden)}}
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
    parts[spec.num_layers + 1] = {"model.norm.weight": (hidden,), "lm_head.weight": (spec.vocab_size, hidden)}
    return parts


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _spec() -> ModelSpec:
    bare = ModelSpec(
        architecture="LlamaForCausalLM",
        dtype=Dtype.FLOAT32,
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        max_context_tokens=256,
        rope_theta=10_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        attention_bias=False,
        part_bytes=(0,) * 4,
    )
    sizes = tuple(sum(4 * prod(shape) for shape in shapes.values()) for shapes in _shapes(bare).values())
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
            places.append(TensorPlace(name=name, dtype=Dtype.FLOAT32, shape=shape, offset=len(image), size_bytes=len(values)))
            image.extend(values)
        parts[part] = tuple(places)
    path = tmp_path_factory.mktemp("pool") / "pool"
    path.write_bytes(image)
    return TinyPool(path, len(image), model, parts)


@pytest.fixture
def leases(pool: TinyPool) -> Iterator[PoolLeases]:
    """Leases that give every part at once; clear ``gate`` to hold parts back."""
    made = PoolLeases(pool)
    made.gate.set()
    made.may_end.set()
    yield made
    assert made.open == 0, "a lease was left open"


@pytest.fixture(scope="session")
def greedy() -> Callable[[int], Sampling]:
    """Sampling of so many tokens, the most likely each."""
    return lambda max_tokens: Sampling(seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
