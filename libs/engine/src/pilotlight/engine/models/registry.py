"""From a checkpoint's architecture to the decoder that runs it."""

from pilotlight.engine.errors import UnsupportedModel
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.llama import LlamaDecoder
from pilotlight.engine.models.qwen2 import Qwen2Decoder
from pilotlight.policy.types import ModelSpec

DECODERS: dict[str, type[Decoder]] = {decoder.architecture: decoder for decoder in (LlamaDecoder, Qwen2Decoder)}


def decoder_of(spec: ModelSpec) -> Decoder:
    """The decoder for a checkpoint.

    Raises:
        UnsupportedModel: no decoder here has this architecture, or its sizes do not go together.
    """
    decoder = DECODERS.get(spec.architecture)
    if decoder is None:
        raise UnsupportedModel(f"{spec.architecture} is not one of {', '.join(sorted(DECODERS))}")
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} key-value heads evenly")
    if spec.head_dim % 2:
        raise UnsupportedModel(f"rotary embedding needs an even head_dim, not {spec.head_dim}")
    return decoder(spec)
