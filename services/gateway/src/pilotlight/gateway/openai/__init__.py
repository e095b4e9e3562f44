"""The OpenAI-compatible API: shapes of requests and responses, and nothing about workers."""
