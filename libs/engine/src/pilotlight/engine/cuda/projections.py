"""The projections of a fused layer and the steps before them, by what its weights are stored in.

::

    residual, x ─ normed ──> rows ─ project ──> qkv, gates and ups
    gates, ups ── opened ──> rows ─ project_divisible ──> x, added to the residual by the next ``normed``
    heads ─────── ready ───> rows ─ project_divisible ──> x      heads are in the ``room_for_heads``
"""

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.fp8 import Fp8Kernels
from pilotlight.engine.cuda.kernels.fp8_rows import Parts, Quantized
from pilotlight.engine.cuda.kernels.gemv import Gemv
from pilotlight.engine.cuda.tilings import (
    BLOCK_GEMM_TILINGS,
    FP8_TILINGS,
    ROW_GEMM_TILINGS,
    TILINGS,
)
from pilotlight.engine.models.layers import Weights, scales_of
from pilotlight.policy.model import ModelSpec, ScaleKind

Rows = TypeVar("Rows")
Added = TypeVar("Added")


class Projections(Protocol[Rows, Added]):
    """Steps over many rows; ``Rows`` is what a projection takes, ``Added`` what it may give where
    the residual is next.
    """

    def normed(self, residual: Tensor, x: Added | None, norm: Tensor) -> Rows:
        """Adds ``x`` to the residual, in place, and gives the norm of the sum."""
        ...

    def opened(self, gates_ups: Tensor) -> Rows:
        """silu(gates) * ups."""
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

    def project_divisible(self, weights: Weights, name: str, rows: Rows) -> Added:
        """One projection with its bias, for the residual."""
        ...

    def whole(self, x: Added | None) -> Tensor | None:
        """What is to be added, as one tensor."""
        ...


class PlainProjections:
    """Weights in the dtype that the engine runs in: torch multiplies."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def normed(self, residual: Tensor, x: Tensor | None, norm: Tensor) -> Tensor:
        """See ``Projections.normed``."""
        return elementwise.add_norm(residual, x, norm, self._eps)

    def opened(self, gates_ups: Tensor) -> Tensor:
        """See ``Projections.opened``."""
        return elementwise.silu_mul(gates_ups)

    def room_for_heads(self, like: Tensor, width: int, head_dim: int) -> Tensor:
        """See ``Projections.room_for_heads``."""
        return like.new_empty(like.shape[0], width)

    def ready(self, x: Tensor | Quantized) -> Tensor:
        """See ``Projections.ready``."""
        assert isinstance(x, Tensor)
        return x

    def project(self, weights: Weights, name: str, rows: Tensor) -> Tensor:
        """See ``Projections.project``."""
        return torch.mm(rows, weights[f"{name}.weight"].t())

    def project_divisible(self, weights: Weights, name: str, rows: Tensor) -> Tensor:
        """See ``Projections.project_divisible``."""
        projected = self.project(weights, name, rows)
        if (bias := weights.get(f"{name}.bias")) is not None:
            projected += bias
        return projected

    def whole(self, x: Tensor | None) -> Tensor | None:
        """See ``Projections.whole``."""
        return x


class Fp8Projections:
    """Weights in fp8."""

    def __init__(self, eps: float, dtype: torch.dtype, *, by_block: bool) -> None:
        self._eps, self._dtype = eps, dtype
        tilings = BLOCK_GEMM_TILINGS if by_block else ROW_GEMM_TILINGS
        self._kernels = Fp8Kernels(by_block, tilings)

    def normed(self, residual: Tensor, x: Tensor | Parts | None, norm: Tensor) -> Quantized:
        """See ``Projections.normed``."""
        return self._kernels.add_norm(residual, x, norm, self._eps)

    def opened(self, gates_ups: Tensor) -> Quantized:
        """See ``Projections.opened``."""
        return self._kernels.silu_mul(gates_ups)

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

    def whole(self, x: Tensor | Parts | None) -> Tensor | None:
        """See ``Projections.whole``."""
        return x.total(self._dtype) if isinstance(x, Parts) else x

    def _product(
        self, weights: Weights, name: str, rows: Quantized, *, divisible: bool
    ) -> Tensor | Parts:
        scales = scales_of(weights, name)
        assert scales is not None, f"{name} has no scales"
        return self._kernels.product(
            rows, weights[f"{name}.weight"], scales, self._dtype, divisible=divisible
        )


def projections_of(spec: ModelSpec, dtype: torch.dtype) -> Projections[Any, Any]:
    """What multiplies the rows of a model that runs in ``dtype``."""
    if spec.quantization is None:
        return PlainProjections(spec.rms_norm_eps)
    by_block = spec.quantization.scales is ScaleKind.BLOCK
    return Fp8Projections(spec.rms_norm_eps, dtype, by_block=by_block)


def gemv_of(spec: ModelSpec) -> Gemv:
    """What multiplies one row of a model's layers."""
    return Gemv(spec.rms_norm_eps, TILINGS if spec.quantization is None else FP8_TILINGS)
