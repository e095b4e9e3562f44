"""OpenAI-compatible API, admin API, holding and routing of requests."""
