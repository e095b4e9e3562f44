"""The projections of a fused layer and the steps before them, by what its weights are stored in.

::

    residual, x ─ normed ──> rows ─┬ project ──> qkv
                                   └ open ─────> rows ─ project_divisible ──> x, added to the residual by the next ``normed``
    heads ─────── ready ───> rows ─ project_divisible ──> x      heads are in the ``room_for_heads``
"""

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.few_rows import (
    divisible_product,
    gated_product,
    product,
)
from pilotlight.engine.cuda.kernels.fp8 import Fp8Kernels
from pilotlight.engine.cuda.kernels.fp8_rows import Quantized
from pilotlight.engine.cuda.kernels.gemv import Gemv
from pilotlight.engine.cuda.kernels.parts import Parts
from pilotlight.engine.cuda.tilings import (
    BLOCK_GEMM_TILINGS,
    FP8_TILINGS,
    ROW_GEMM_TILINGS,
    TILINGS,
)
from pilotlight.engine.models.layers import Weights, scales_of
from pilotlight.policy.model import ModelSpec, ScaleKind

Rows = TypeVar("Rows")


class Projections(Protocol[Rows]):
    """Steps over many rows; ``Rows`` is what a projection takes. Where the residual is next, it may
    give parts.
    """

    def normed(self, residual: Tensor, x: Tensor | Parts | None, norm: Tensor) -> Rows:
        """Adds ``x`` to the residual, in place, and gives the norm of the sum."""
        ...

    def open(self, weights: Weights, name: str, rows: Rows) -> Rows:
        """silu(gates) * ups, of one projection to both, without a bias."""
        ...

    def room_for_heads(self, like: Tensor, width: int, head_dim: int) -> Tensor | Quantized:
        """What attention writes its heads to, for the rows of ``like``."""
        ...

    def ready(self, x: Tensor | Quantized) -> Rows:
        """Rows as they are."""
        ...

    def project(self, weights: Weights, name: str, rows: Rows) -> Tensor:
        """One projection without its bias."""
        ...

    def project_divisible(self, weights: Weights, name: str, rows: Rows) -> Tensor | Parts:
        """One projection with its bias, for the residual."""
        ...


class PlainProjections:
    """Weights in the dtype that the engine runs in."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def normed(self, residual: Tensor, x: Tensor | Parts | None, norm: Tensor) -> Tensor:
        """See ``Projections.normed``."""
        return elementwise.add_norm(residual, x, norm, self._eps)

    def open(self, weights: Weights, name: str, rows: Tensor) -> Tensor:
        """See ``Projections.open``."""
        return gated_product(weights[f"{name}.weight"], rows)

    def room_for_heads(self, like: Tensor, width: int, head_dim: int) -> Tensor:
        """See ``Projections.room_for_heads``."""
        return like.new_empty(like.shape[0], width)

    def ready(self, x: Tensor | Quantized) -> Tensor:
        """See ``Projections.ready``."""
        assert isinstance(x, Tensor)
        return x

    def project(self, weights: Weights, name: str, rows: Tensor) -> Tensor:
        """See ``Projections.project``."""
        return product(weights[f"{name}.weight"], rows)

    def project_divisible(self, weights: Weights, name: str, rows: Tensor) -> Tensor | Parts:
        """See ``Projections.project_divisible``."""
        bias = weights.get(f"{name}.bias")
        if bias is None:
            return divisible_product(weights[f"{name}.weight"], rows)
        return self.project(weights, name, rows).add_(bias)


class Fp8Projections:
    """Weights in fp8."""

    def __init__(self, eps: float, dtype: torch.dtype, *, by_block: bool) -> None:
        self._eps, self._dtype = eps, dtype
        tilings = BLOCK_GEMM_TILINGS if by_block else ROW_GEMM_TILINGS
        self._kernels = Fp8Kernels(by_block, tilings)

    def normed(self, residual: Tensor, x: Tensor | Parts | None, norm: Tensor) -> Quantized:
        """See ``Projections.normed``."""
        return self._kernels.add_norm(residual, x, norm, self._eps)

    def open(self, weights: Weights, name: str, rows: Quantized) -> Quantized:
        """See ``Projections.open``."""
        return self._kernels.silu_mul(self.project(weights, name, rows))

    def room_for_heads(self, like: Tensor, width: int, head_dim: int) -> Tensor | Quantized:
        """See ``Projections.room_for_heads``."""
        return self._kernels.room_for_heads(like, width, head_dim)

    def ready(self, x: Tensor | Quantized) -> Quantized:
        """See ``Projections.ready``."""
        return x if isinstance(x, Quantized) else self._kernels.quantize(x)

    def project(self, weights: Weights, name: str, rows: Quantized) -> Tensor:
        """See ``Projections.project``."""
        projected = self._product(weights, name, rows, divisible=False)
        assert isinstance(projected, Tensor)
        return projected

    def project_divisible(self, weights: Weights, name: str, rows: Quantized) -> Tensor | Parts:
        """See ``Projections.project_divisible``."""
        bias = weights.get(f"{name}.bias")
        if bias is None:
            return self._product(weights, name, rows, divisible=True)
        return self.project(weights, name, rows).add_(bias)

    def _product(
        self, weights: Weights, name: str, rows: Quantized, *, divisible: bool
    ) -> Tensor | Parts:
        scales = scales_of(weights, name)
        assert scales is not None, f"{name} has no scales"
        return self._kernels.product(
            rows, weights[f"{name}.weight"], scales, self._dtype, divisible=divisible
        )


def projections_of(spec: ModelSpec, dtype: torch.dtype) -> Projections[Any]:
    """What multiplies the rows of a model that runs in ``dtype``."""
    if spec.quantization is None:
        return PlainProjections(spec.rms_norm_eps)
    by_block = spec.quantization.scales is ScaleKind.BLOCK
    return Fp8Projections(spec.rms_norm_eps, dtype, by_block=by_block)


def gemv_of(spec: ModelSpec) -> Gemv:
    """What multiplies one row of a model's layers."""
    return Gemv(spec.rms_norm_eps, TILINGS if spec.quantization is None else FP8_TILINGS)
