"""Files in folders of a checkpoint: a source lists none of them but those that mean something."""

import os
from collections.abc import Iterator
from pathlib import Path

POOLING_FILE = "1_Pooling/config.json"
"""How sentence-transformers makes a vector of a text."""
FILES_BELOW = (POOLING_FILE,)


def belongs(name: str) -> bool:
    """Whether a path is one that a source lists."""
    return ("/" not in name and name.isprintable()) or name in FILES_BELOW


def stats_below(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Those of ``FILES_BELOW`` that a folder has."""
    for name in FILES_BELOW:
        if (path := root / name).is_file():
            yield name, path.stat()
