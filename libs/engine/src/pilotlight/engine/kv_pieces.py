"""Keys and values of one request on their way from one stage to another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.errors import BadRequest
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.request import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPiece:
    """What one stage had of a request: positions [start, stop) in some layers.

    ::

        layers 3  [ a piece ......... )[ a later one )
               2  [                   )[             )
               1  [ one of another stage .......)
               0  [                             )
                  0 ........... positions ...........
    """

    key: RequestKey
    layers: Stage
    start: int
    keys_and_values: Tensor
    """[num_layers, 2, stop - start, num_kv_heads, head_dim], a copy."""

    @property
    def stop(self) -> int:
        """The position behind the last one."""
        return self.start + self.keys_and_values.shape[2]

    def cut(self, layers: Stage, start: int, stop: int) -> "KvPiece | None":
        """What of it lies in these layers and positions; None if nothing does."""
        first, last = max(layers.start, self.layers.start), min(layers.stop, self.layers.stop)
        start, stop = max(start, self.start), min(stop, self.stop)
        if first >= last or start >= stop:
            return None
        rows = self.keys_and_values[first - self.layers.start : last - self.layers.start]
        return replace(
            self,
            layers=Stage(first, last),
            start=start,
            keys_and_values=rows[:, :, start - self.start : stop - self.start],
        )


def check_pieces(pieces: Sequence[KvPiece], spec: ModelSpec, dtype: Dtype) -> None:
    """Refuses pieces of another model.

    Raises:
        BadRequest: they are of other layers, shapes or another dtype than the model has.
    """
    for piece in pieces:
        shape = tuple(piece.keys_and_values.shape)
        expected = (piece.layers.num_layers, 2, *shape[2:3], spec.num_kv_heads, spec.head_dim)
        if shape != expected or piece.layers.stop > spec.num_layers or piece.start < 0:
            raise BadRequest(f"a KV piece of shape {shape} does not fit layers of shape {expected}")
        if piece.keys_and_values.dtype is not TORCH_DTYPES[dtype]:
            raise BadRequest(
                f"a KV piece is {piece.keys_and_values.dtype}, the instance {dtype.value}"
            )


def covered_tokens(pieces: Sequence[KvPiece], layers: Stage) -> int:
    """The positions [0, n) that the pieces hold in every one of these layers."""
    return min(_covered_in(pieces, layer) for layer in range(layers.start, layers.stop))


def _covered_in(pieces: Sequence[KvPiece], layer: int) -> int:
    stop = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.layers.start <= layer < piece.layers.stop and piece.start <= stop:
            stop = max(stop, piece.stop)
    return stop
