"""Stands in for triton where it is not installed: its cache of compiled kernels, with the same
folders, files and calls, and a compiler that makes an image of nothing.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

__all__ = ["compiled", "driver", "knobs", "library"]
__version__ = "0.0.1"
STAGES = ("source", "ttir", "ptx", "cubin")
runtime = SimpleNamespace(driver=driver)


def compiled(name: str, image: bytes) -> tuple[bytes, bool]:
    """A kernel's image, and whether it was compiled for it."""
    manager = get_cache_manager(hashlib.sha256(name.encode()).hexdigest())
    facts = f"{name}.json"
    group = manager.get_group(facts) or {}
    if facts in group:
        json.loads(Path(group[facts]).read_text())
        return Path(group[f"{name}.cubin"]).read_bytes(), False
    for stage in STAGES:
        data = image if stage == "cubin" else stage
        group[f"{name}.{stage}"] = manager.put(data, f"{name}.{stage}")
    group[facts] = manager.put(json.dumps({"name": name, "shared": 0}), facts, binary=False)
    manager.put_group(facts, group)
    return image, True


def library(name: str) -> tuple[bytes, bool]:
    """What launches kernels, and whether it was compiled for it."""
    manager = get_cache_manager(hashlib.sha256(b"library").hexdigest())
    path = manager.get_file(f"{name}.so")
    if path is not None:
        return Path(path).read_bytes(), False
    return Path(manager.put(b"\x7fELF library", f"{name}.so")).read_bytes(), True
