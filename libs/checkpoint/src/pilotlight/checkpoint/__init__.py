"""Safetensors headers to a manifest in layer order; model configuration to a ModelSpec."""
