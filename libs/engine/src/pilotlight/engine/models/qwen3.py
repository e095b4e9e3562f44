"""Qwen3."""

from pilotlight.engine.models.decoder import Decoder


class Qwen3Decoder(Decoder):
    """Norms queries and keys, and has no biases unless the configuration asks for them."""

    architecture = "Qwen3ForCausalLM"
    head_norms = True
