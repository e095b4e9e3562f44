"""Llama 1 to 3, and whatever else registers as ``LlamaForCausalLM``."""

from pilotlight.engine.models.decoder import Decoder


class LlamaDecoder(Decoder):
    """The shared decoder as it is. ``attention_bias`` means all four projections here."""

    architecture = "LlamaForCausalLM"
