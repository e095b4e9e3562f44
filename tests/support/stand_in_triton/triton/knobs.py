"""What triton is told."""

import os


class _Cache:
    manager_class = None

    @property
    def dir(self) -> str:
        return os.environ["TRITON_CACHE_DIR"]


cache = _Cache()
