"""From a checkpoint's architecture to the decoder that runs it."""

from functools import lru_cache

from pilotlight.engine.errors import UnsupportedModel
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.encoder import Encoder
from pilotlight.engine.models.gemma3 import Gemma3Decoder
from pilotlight.engine.models.llama import LlamaDecoder
from pilotlight.engine.models.mistral import MistralDecoder
from pilotlight.engine.models.qwen2 import Qwen2Decoder
from pilotlight.engine.models.qwen3 import Qwen3Decoder
from pilotlight.engine.models.qwen3_moe import Qwen3MoeDecoder
from pilotlight.policy.model import ModelSpec

_FAMILIES: tuple[type[Decoder], ...] = (
    LlamaDecoder,
    MistralDecoder,
    Qwen2Decoder,
    Qwen3Decoder,
    Qwen3MoeDecoder,
    Gemma3Decoder,
)
DECODERS = {decoder.architecture: decoder for decoder in _FAMILIES}
REMEMBERED = 16
"""Kinds of models whose decoders are kept, with how they lie in a slot: a start waits for neither
where its kind has been here."""


@lru_cache(maxsize=REMEMBERED)
def decoder_of(spec: ModelSpec) -> Decoder:
    """The decoder for a checkpoint: the same one for all of one kind, for it holds no parameters.

    Raises:
        UnsupportedModel: no decoder here has this architecture, or its sizes do not go together.
    """
    if spec.encoder is not None:
        return Encoder(spec, spec.encoder)
    decoder = DECODERS.get(spec.architecture)
    if decoder is None:
        raise UnsupportedModel(
            f"architecture {spec.architecture} is not one of {', '.join(DECODERS)}"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"{spec.num_heads} heads cannot share {spec.num_kv_heads} key-value heads evenly"
        )
    if spec.head_dim % 2:
        raise UnsupportedModel(f"rotary embedding needs an even head_dim, not {spec.head_dim}")
    if spec.sliding_layers and not spec.sliding_window_tokens:
        raise UnsupportedModel("layers slide, but there is no sliding_window")
    if spec.experts and not 0 < spec.experts.experts_per_token <= spec.experts.num_experts:
        raise UnsupportedModel(
            f"a token cannot have {spec.experts.experts_per_token} of {spec.experts.num_experts} experts"
        )
    return decoder(spec)
