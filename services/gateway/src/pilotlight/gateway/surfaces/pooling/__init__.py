"""Vectors and scores: ``/v1/embeddings``, ``/v1/rerank``, ``/v1/score``."""
