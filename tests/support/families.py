"""The families that the engine runs, one tiny model of each: whatever a mode of the engine has to
leave as it is, it is tried on all.

Names are those of ``KINDS`` in ``libs/engine/tests/conftest.py``.
"""

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen2-window", "qwen3", "qwen3-moe", "gemma3"]
"""Every architecture, and those of its settings that change what is kept between tokens."""
