"""Runs a small model through a new engine, so that the first real request finds torch's threads,
libraries and kernels set up.

On a CPU this takes some tens of milliseconds off the first prefill of a child, which would be a
cold start's. On a GPU it loads cuBLAS and what launches kernels, and captures a step; the kernels
of other shapes still come with the first model that has them. On a machine that has compiled none
yet that takes ten seconds, so it ends before the next one when a command has come.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import NotWanted
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, ModelSpec
from pilotlight.policy.request import Sampling

INSTANCE = InstanceId("warm-up")
STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The model, and the memory that it gets."""

    spec: ModelSpec
    device_bytes: int


_TINY = ModelSpec(
    architecture="LlamaForCausalLM",
    dtype=Dtype.FLOAT32,
    num_layers=1,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=32,
    max_context_tokens=64,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
    attention_bias=False,
    part_bytes=(0, 0, 0),
)


CPU_PROBE = Probe(spec=_TINY, device_bytes=1024 * 1024)
CUDA_PROBE = Probe(
    spec=replace(
        _TINY,
        hidden_size=1024,
        intermediate_size=2048,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=1024,
    ),
    device_bytes=256 * 1024 * 1024,
)
"""Of a common shape of heads; its memory comes in granules of megabytes."""


def never() -> bool:
    """Nothing interrupts."""
    return False


def warm_up(
    engine: Engine, probe: Probe = CPU_PROBE, interrupted: Callable[[], bool] = never
) -> bool:
    """Load, convert, prefill, decode, sample, unload; the engine is as empty afterwards as it was
    before.

    Args:
        engine: holds nothing.
        probe: what runs.
        interrupted: asked before each step.

    Returns:
        False: it was interrupted, and has not done all of that.

    Raises:
        EngineError: the engine does not work.
    """
    # Besides, a step ends so that would compile (``kernels.compiling_until``).
    try:
        _run(engine, probe, interrupted)
    except NotWanted:
        engine.drop(INSTANCE)
        engine.step()  # That its requests ended concerns nobody.
        return False
    return True


def _run(engine: Engine, probe: Probe, interrupted: Callable[[], bool]) -> None:
    spec = probe.spec
    decoder = decoder_of(spec)
    engine.begin_load(INSTANCE, spec, spec.whole, Dtype.BFLOAT16, probe.device_bytes)
    for part in spec.parts_of(spec.whole):
        shapes = {
            decoder.prefix(part) + name: shape for name, shape in decoder.shapes(part).items()
        }
        zeros = {
            name: (Dtype.FLOAT32, shape, memoryview(bytes(4 * prod(shape))))
            for name, shape in shapes.items()
        }
        engine.place_part(INSTANCE, part, zeros)
    for index, temperature in enumerate((0.0, 1.0)):
        sampling = Sampling(
            seed=index,
            max_tokens=STEPS,
            temperature=temperature,
            top_p=0.9,
            top_k=8,
            ignore_eos=True,
        )
        engine.add(RequestId(f"warm-up-{index}"), 0, INSTANCE, [1, 2, 3], [], sampling)
    while engine.has_work:
        if interrupted():
            raise NotWanted
        engine.step()
    engine.unload(INSTANCE)
