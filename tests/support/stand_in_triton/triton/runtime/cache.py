"""Triton's cache: a folder for each key."""

import base64
import functools
import json
import os
from pathlib import Path

from triton import knobs


class FileCacheManager:
    """Of one key."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.key = key
        self.cache_dir = os.path.join(knobs.cache.dir, key)
        os.makedirs(self.cache_dir, exist_ok=True)

    def get_file(self, filename: str) -> str | None:
        path = os.path.join(self.cache_dir, filename)
        return path if os.path.exists(path) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        path = self.get_file(f"__grp__{filename}")
        return None if path is None else json.loads(Path(path).read_text())["child_paths"]

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return self.put(json.dumps({"child_paths": group}), f"__grp__{filename}", binary=False)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        path = os.path.join(self.cache_dir, filename)
        Path(path).write_bytes(data if isinstance(data, bytes) else str(data).encode())
        return path


@functools.cache
def triton_key() -> str:
    """Of triton itself."""
    return "0.0.1"


def get_cache_manager(key: str) -> FileCacheManager:
    made = knobs.cache.manager_class or FileCacheManager
    return made(base64.b32encode(bytes.fromhex(key)).decode().rstrip("="))
