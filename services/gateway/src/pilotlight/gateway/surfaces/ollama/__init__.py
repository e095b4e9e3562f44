"""Ollama's API, over the same core as chat completions."""
