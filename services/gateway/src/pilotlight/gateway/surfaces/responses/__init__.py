"""OpenAI's Responses API, over the same core as chat completions."""
