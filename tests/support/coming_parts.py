"""A model whose parts are still coming: how a test begins its load and places parts."""

from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId

I = InstanceId("i")  # noqa: E741
KV_TOKENS = 1024
MAX_TOKENS = 5
PARTS = 6
"""Embedding, four layers, head."""
PROMPTS = [
    [(7 * index + shift) % 199 for index in range(length)]
    for shift, length in ((0, 40), (0, 37), (3, 5), (11, 1))
]
"""The first two begin alike."""


def device_bytes(checkpoint, blocks: int) -> int:
    spec = checkpoint.spec
    return parameter_bytes(
        decoder_of(spec), spec.whole, spec.dtype
    ) + 16 * blocks * spec.kv_bytes_per_token(spec.whole, spec.dtype)


def begin(runs, checkpoint, blocks: int = KV_TOKENS // 16) -> None:
    """Starts a load of which no part has come yet."""
    spec = checkpoint.spec
    room = runs.engine.begin_load(I, spec, spec.whole, spec.dtype, device_bytes(checkpoint, blocks))
    assert len(room.parts) == PARTS
    runs.capacity_tokens += room.kv_capacity_tokens


def place(runs, checkpoint, *parts: int) -> None:
    for part in parts:
        runs.engine.place_part(I, part, checkpoint.parts[part])
