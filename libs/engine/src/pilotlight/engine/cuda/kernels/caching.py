"""Where triton looks for what it has compiled: first among what an artifact gave this process
(``cuda.kernel_store``), then in its own cache.
"""

import os
import sysconfig
from typing import TYPE_CHECKING

import triton
from triton import knobs
from triton.runtime import cache
from triton.runtime.cache import FileCacheManager

from pilotlight.engine.cuda.compiled import KernelsRefused
from pilotlight.engine.cuda.kernel_store import STORE, Files
from pilotlight.policy.materialized import CompiledFor

if TYPE_CHECKING:
    import torch


class RestoredFirst(FileCacheManager):  # pyright: ignore[reportUntypedBaseClass] - there may be no triton
    """Triton makes one for each key that it looks up."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        """``override`` and ``dump``: folders for who debugs kernels, which are left alone."""
        super().__init__(key, override, dump)
        self._is_cache = not (override or dump)

    def get_file(self, filename: str) -> str | None:
        """One file: a library that launches kernels."""
        if not self._is_cache:
            return super().get_file(filename)
        found = STORE.file(self.key, filename)
        if found is None and not STORE.only:
            found = super().get_file(filename)
        if found is not None:
            STORE.use(self.key, {filename: found})
        return found

    def get_group(self, filename: str) -> Files | None:
        """All files of a kernel, by the one with its facts."""
        if not self._is_cache:
            return super().get_group(filename)
        found = STORE.kernel(self.key, filename)
        if found is None and not STORE.only:
            found = super().get_group(filename)
        if found is None:
            STORE.lack()
        else:
            STORE.use(self.key, found)
        return found

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Keeps what was made."""
        path = super().put(data, filename, binary)
        if self._is_cache:
            STORE.make(self.key, filename)
            if filename.endswith(".so"):
                STORE.use(self.key, {filename: path})
        return path

    def put_group(self, filename: str, group: Files) -> str:
        """Keeps a kernel that was compiled."""
        if self._is_cache:
            STORE.use(self.key, group)
        return super().put_group(filename, group)


def install() -> None:
    """From now on triton looks here.

    Raises:
        KernelsRefused: ``cache_manager``: somebody told it to look elsewhere.
    """
    there = knobs.cache.manager_class
    if there not in (None, RestoredFirst):
        raise KernelsRefused("cache_manager", f"triton's cache is {there.__name__}'s")
    knobs.cache.manager_class = RestoredFirst


def read_compiler() -> None:
    """Has triton make the digest of itself that is in every key: it reads its 500 MB for that, once
    in a process, and the first kernel would wait.
    """
    digest = getattr(cache, "triton_key", None)
    if digest is not None:
        digest()


def made_for(device: "torch.device") -> CompiledFor:
    """What kernels are compiled for in this process."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return CompiledFor(
        compiler=f"triton {triton.__version__}",
        processor=f"sm_{major}{minor}",
        python=str(sysconfig.get_config_var("EXT_SUFFIX")),
        libc=os.confstr("CS_GNU_LIBC_VERSION") or "",
    )
