"""How GEMVs, products of one row, are cut up on an H200: measured, for the widths of common
models.
"""

from collections.abc import Mapping

from pilotlight.engine.cuda.kernels.gemv import Tiling

_WIDE = Tiling(2, 1024, 4)

TILINGS: Mapping[tuple[int, int, bool], Tiling] = {
    (6912, 2560, True): Tiling(16, 256, 4),
    (2560, 6912, False): _WIDE,
    (6144, 4096, False): Tiling(8, 512, 4),
    (12288, 4096, True): _WIDE,
    (4096, 12288, False): Tiling(1, 2048, 4),
    (151936, 4096, False): Tiling(16, 256, 4),
}
"""By rows of the result, width, and whether it is gated; ``USUAL`` does for the others."""
