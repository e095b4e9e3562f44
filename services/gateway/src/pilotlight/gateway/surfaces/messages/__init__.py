"""Anthropic's Messages API, over the same core as chat completions."""
