"""Runs a model of a few kilobytes through a new engine, so that the first real request finds torch's threads and kernels set up.

On a CPU this takes some tens of milliseconds off the first prefill of a child, which would be a cold start's.
"""

from math import prod

from pilotlight.engine.engine import Engine
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.types import Dtype, InstanceId, ModelSpec, RequestId, Sampling

INSTANCE = InstanceId("warm-up")
DEVICE_BYTES = 1024 * 1024
STEPS = 4

SPEC = ModelSpec(
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


def warm_up(engine: Engine) -> None:
    """Load, convert, prefill, decode, sample, unload; the engine is as empty afterwards as it was before.

    Raises:
        EngineError: the engine does not work.
    """
    decoder = decoder_of(SPEC)
    engine.begin_load(INSTANCE, SPEC, SPEC.whole, Dtype.BFLOAT16, DEVICE_BYTES)
    for part in SPEC.parts_of(SPEC.whole):
        shapes = {decoder.prefix(part) + name: shape for name, shape in decoder.shapes(part).items()}
        zeros = {name: (Dtype.FLOAT32, shape, memoryview(bytes(4 * prod(shape)))) for name, shape in shapes.items()}
        engine.place_part(INSTANCE, part, zeros)
    for index, temperature in enumerate((0.0, 1.0)):
        sampling = Sampling(seed=index, max_tokens=STEPS, temperature=temperature, top_p=0.9, top_k=8, ignore_eos=True)
        engine.add(RequestId(f"warm-up-{index}"), 0, INSTANCE, [1, 2, 3], [], sampling)
    while engine.has_work:
        engine.step()
    engine.unload(INSTANCE)
