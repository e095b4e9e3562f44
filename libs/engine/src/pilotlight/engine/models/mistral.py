"""Mistral 7B and its kin."""

from pilotlight.engine.models.decoder import Decoder


class MistralDecoder(Decoder):
    """The shared decoder as it is, mostly with a sliding window in every layer; no projection has a
    bias.
    """

    architecture = "MistralForCausalLM"
