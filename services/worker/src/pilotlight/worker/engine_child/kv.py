"""KV of requests between the engine and its worker: pieces as bytes."""

from collections.abc import Sequence

import torch

from pilotlight.common.messages.engine import KvBytes
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.errors import BadRequest
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.policy.request import RequestKey

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


def bytes_of(pieces: Sequence[KvPiece]) -> tuple[KvBytes, ...]:
    """Pieces as they travel."""
    return tuple(
        KvBytes(
            layers=piece.layers,
            start=piece.start,
            shape=tuple(piece.keys_and_values.shape),
            dtype=_DTYPES[piece.keys_and_values.dtype],
            data=piece.keys_and_values.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for piece in pieces
    )


def pieces_of(key: RequestKey, kv: Sequence[KvBytes]) -> tuple[KvPiece, ...]:
    """Pieces that have come.

    Raises:
        BadRequest: one has not the bytes that its shape says.
    """
    return tuple(_piece(key, one) for one in kv)


def _piece(key: RequestKey, kv: KvBytes) -> KvPiece:
    count = 1
    for length in kv.shape:
        count *= max(0, length)
    if not count or len(kv.data) != count * kv.dtype.size_bytes:
        raise BadRequest(f"KV of shape {kv.shape} comes with {len(kv.data)} bytes")
    # A tensor of its own: the frame is not kept, and torch does not take bytes that cannot be
    # written.
    tensor = torch.frombuffer(bytearray(kv.data), dtype=TORCH_DTYPES[kv.dtype]).view(kv.shape)
    return KvPiece(key=key, layers=kv.layers, start=kv.start, keys_and_values=tensor)
