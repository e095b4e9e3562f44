"""How products of one row are cut up on an H200, where a cut was measured that beats the usual one."""

from collections.abc import Mapping

from pilotlight.engine.cuda.kernels.vector import Tiling

TILINGS: Mapping[tuple[int, int, bool], Tiling] = {}
"""By rows of the result, width, and whether it is gated."""
