"""Qwen2 and Qwen2.5."""

from pilotlight.engine.models.decoder import Decoder


class Qwen2Decoder(Decoder):
    """Queries, keys and values always have a bias, the output projection never: the configuration
    has no say in it.
    """

    architecture = "Qwen2ForCausalLM"

    def biased_projections(self) -> tuple[str, ...]:
        return ("q_proj", "k_proj", "v_proj")
