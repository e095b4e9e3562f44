"""Qwen3 with experts."""

from pilotlight.engine.models.qwen3 import Qwen3Decoder


class Qwen3MoeDecoder(Qwen3Decoder):
    """Qwen3 whose feed-forward networks are mixtures of experts; ``ModelSpec.experts`` says in
    which layers.
    """

    architecture = "Qwen3MoeForCausalLM"
