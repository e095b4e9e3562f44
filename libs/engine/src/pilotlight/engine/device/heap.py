"""The process's own heap: everything on the host that is not in the arena."""

import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc_trim.argtypes = [ctypes.c_size_t]


def give_back_heap() -> None:
    """Gives the system what is free in the heap.

    The C library keeps it, up to tens of MiB: tensors of a step's size are freed between smaller
    blocks that stay.
    """
    _libc.malloc_trim(0)
