"""Sizes that launches ask for again and again: triton's own helpers work inside of kernels too, and
take microseconds on the host.
"""

from functools import cache


@cache
def power_of_2(least: int) -> int:
    """The smallest power of two that is not below ``least``, which is 1 or more."""
    return 1 << (least - 1).bit_length()


@cache
def pieces_of(whole: int, size: int) -> int:
    """How many of a size cover the whole."""
    return -(-whole // size)
