"""How products are cut up on an H200: measured, for the widths of common models."""

from collections.abc import Mapping

from pilotlight.engine.cuda.kernels.fp8 import GemmTiling, Tilings
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
"""Of one row: by rows of the result, width, and whether it is gated; ``USUAL`` does for the
others."""

FP8_TILINGS: Mapping[tuple[int, int, bool], Tiling] = {
    (6144, 4096, False): Tiling(8, 512, 2, 1),
    (4096, 4096, False): Tiling(4, 1024, 2, 1),
    (12288, 4096, True): Tiling(16, 128, 2, 4),
    (4096, 12288, False): Tiling(8, 512, 2, 5),
    (151936, 4096, False): TILINGS[151936, 4096, False],
}
"""The same for weights in fp8, and for a head beside them; ``USUAL_FP8`` does for the others."""

_FEW: Tilings = {
    (4096, 4096, 32): GemmTiling(128, 8, 4, 3),
    (4096, 12288, 32): GemmTiling(128, 8, 4, 3),
}

ROW_GEMM_TILINGS: Tilings = {
    **_FEW,
    (6144, 4096, 64): GemmTiling(64, 1, 4, 6),
    (4096, 4096, 64): GemmTiling(64, 4, 4, 4),
    (4096, 12288, 64): GemmTiling(64, 4, 4, 4),
    (24576, 4096, 192): GemmTiling(64, 1, 4, 4),
    (4096, 12288, 256): GemmTiling(128, 2, 4, 4),
}
"""Of several rows with weights in fp8 and scales by row. ``usual_tiling`` or cuBLAS does for the
others."""

BLOCK_GEMM_TILINGS: Tilings = {
    **_FEW,
    (6144, 4096, 64): GemmTiling(64, 1, 4, 5, tokens=32),
    (4096, 12288, 128): GemmTiling(128, 4, 8, 4),
}
"""The same with scales by block."""
