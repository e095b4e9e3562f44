"""``config.json`` of an encoder to ``ModelSpec``."""

from collections.abc import Container, Mapping

from pilotlight.checkpoint.encoders import ENCODERS, WORDS
from pilotlight.checkpoint.errors import UnsupportedModel, quote
from pilotlight.checkpoint.pooling import text_tokens
from pilotlight.checkpoint.strict_json import CONFIG_FILE, JsonObject
from pilotlight.policy.model import Dtype, ModelSpec
from pilotlight.policy.pooling import EncoderSpec, Pooling

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
MAX_ENCODER_LAYERS = 256
MAX_ENCODER_WIDTH = 1 << 16
MAX_ENCODER_HEADS = 1024
MAX_POSITIONS = 1 << 17
MAX_ENCODER_VOCABULARY = 1 << 22


def parse_encoder(
    config: JsonObject,
    architecture: str,
    pooling: Pooling,
    stored: Dtype,
    *,
    said: Mapping[str, bytes],
    names: Container[str],
) -> ModelSpec:
    """Read an encoder's configuration; sizes of parts are left out.

    Args:
        config: the content of ``config.json``.
        architecture: one of ``ENCODERS``.
        pooling: how it makes vectors or scores.
        stored: the element type of the weights' files.
        said: the files that say how vectors are made.
        names: of the checkpoint's tensors.

    Raises:
        BadCheckpoint: a value is missing, of the wrong type or out of bounds.
        UnsupportedModel: something that the configuration asks for is not supported.
    """
    family = ENCODERS[architecture]
    positions = config.text("position_embedding_type", default="absolute")
    if positions != "absolute":
        raise UnsupportedModel(
            f"position_embedding_type {quote(positions)} is not supported", file=CONFIG_FILE
        )
    for flag in ("is_decoder", "add_cross_attention"):
        if config.flag(flag, default=False):
            raise UnsupportedModel(f"{flag} is not supported for encoders", file=CONFIG_FILE)
    activation = config.text("hidden_act", default="gelu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"the activation {quote(activation)} is not one of {', '.join(ACTIVATIONS)}",
            file=CONFIG_FILE,
        )
    hidden_size = config.integer("hidden_size", 1, MAX_ENCODER_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_ENCODER_HEADS)
    if hidden_size % num_heads:
        raise config.fault("hidden_size", f"is no multiple of the {num_heads} attention heads")
    num_positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS, default=512)
    first = 0
    if family.padded_positions:
        first = 1 + config.integer("pad_token_id", 0, num_positions, default=1)
        if first >= num_positions:
            raise config.fault("pad_token_id", "leaves no position")
    prefix = family.prefix if family.prefix + WORDS in names else ""
    return ModelSpec(
        architecture=architecture,
        dtype=stored,
        num_layers=config.integer("num_hidden_layers", 1, MAX_ENCODER_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MAX_ENCODER_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=config.integer("vocab_size", 1, MAX_ENCODER_VOCABULARY),
        max_context_tokens=text_tokens(said, num_positions - first),
        rope_theta=1.0,
        rope_scaling=None,
        rms_norm_eps=config.number("layer_norm_eps", 1e-15, 1e-1, default=1e-12),
        tied_embeddings=False,
        attention_bias=True,
        part_bytes=(),
        pooling=pooling,
        encoder=EncoderSpec(
            first_position=first,
            num_positions=num_positions,
            num_types=config.integer("type_vocab_size", 1, MAX_POSITIONS, default=2),
            activation=activation,
        ),
        tensor_prefix=prefix,
    )
