"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): noise
without state.

A block of the output depends on key and counter alone, so the noise of output position i is the
same whichever engine samples with it, in whatever batch, before or after a resume. It is written
out in integers, not taken from numpy, because every engine must have the same: the native one on
any device, and a child with another interpreter.
"""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_4x32(key: int, counter: int) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 64-bit key and a 128-bit counter; both wrap around, so that any
    integer will do.
    """
    k0, k1 = key & _MASK, key >> 32 & _MASK
    c0, c1, c2, c3 = (counter >> shift & _MASK for shift in (0, 32, 64, 96))
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK, p0 >> 32 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The noise of one output position: 53 bits, in [0, 1)."""
    high, low, _, _ = philox_4x32(seed, position)
    return ((high << 32 | low) >> 11) * 2.0**-53
