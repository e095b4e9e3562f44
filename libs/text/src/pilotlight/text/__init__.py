"""Tokenizers, chat templates, incremental detokenization, stop strings."""
