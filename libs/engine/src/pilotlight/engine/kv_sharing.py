"""KV that one engine asks another one for: what that has in place of the same tokens of the same
model, of whichever request it was.

::

    asks                                     has it
    KvAsked(instance, tokens)  ->
                               <- KvFound    of some layers, with their keys and values
                               <- KvFound    of the next ones
                               <- KvNone     nothing more

Content is asked for by its tokens, so nothing has to be kept for a request that leaves, and nobody
has to be told when it has arrived. Blocks that are given to others meanwhile are found no more:
then later layers have fewer positions than the first ones, and what all layers have is used.
"""

from collections.abc import Callable

import msgspec
from torch import Tensor

from pilotlight.engine.channel.channel import Channel, Frame
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.pipeline.frames import (
    TensorHeader,
    bytes_of,
    header_of,
    on_device,
    tensor_of,
)
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey


class KvAsked(msgspec.Struct, tag="kv_asked", frozen=True, kw_only=True):
    """What is there of these tokens?"""

    instance_id: InstanceId
    """As the engine that is asked calls it."""
    token_ids: tuple[int, ...]


class KvFound(msgspec.Struct, tag="kv_found", frozen=True, kw_only=True):
    """Keys and values of the first positions; the payload is as in ``KvPiece``."""

    layers: Stage
    tensor: TensorHeader


class KvNone(msgspec.Struct, tag="kv_none", frozen=True, kw_only=True):
    """There is nothing more."""


_encoder = msgspec.msgpack.Encoder()
_asked = msgspec.msgpack.Decoder(KvAsked)
_given = msgspec.msgpack.Decoder(KvFound | KvNone)
_NOTHING = memoryview(b"")


def ask(
    channel: Channel,
    asked: KvAsked,
    key: RequestKey,
    left_s: Callable[[], float],
    device_bytes: int = 0,
) -> tuple[KvPiece, ...]:
    """What another engine has of some tokens; the channel is of no use afterwards.

    Args:
        channel: to that engine.
        asked: for what.
        key: whose the pieces are here.
        left_s: what is left of the time.
        device_bytes: so much of what comes to this device may stay there; the rest is copied to the
            host's memory.

    Raises:
        PeerLost, PeerSilent: it went away, or did not say all in time.
    """
    channel.send(Frame(_encoder.encode(asked), _NOTHING), left_s())
    pieces: list[KvPiece] = []
    while True:
        frame = channel.receive(left_s())
        try:
            given = _given.decode(frame.header)
        except msgspec.DecodeError as error:
            raise PeerLost(f"what came is no KV: {error}") from error
        if isinstance(given, KvNone):
            return tuple(pieces)
        tensor = tensor_of(frame, given.tensor)
        if tensor.ndim != KV_DIMENSIONS:
            raise PeerLost(f"KV of {tensor.ndim} dimensions came")
        if on_device(tensor):
            device_bytes -= tensor.nbytes
            tensor = tensor if device_bytes >= 0 else tensor.cpu()
        pieces.append(KvPiece(key=key, layers=given.layers, start=0, keys_and_values=tensor))


def answer(
    channel: Channel,
    find: Callable[[KvAsked, int], tuple[Stage, Tensor] | None],
    timeout_s: float,
) -> None:
    """Gives another engine what it asks for, and waits until it hangs up.

    Args:
        channel: by which it asks.
        find: what there is from a layer on.
        timeout_s: for each frame.

    Raises:
        PeerLost, PeerSilent: it went away before, or took too long.
    """
    try:
        asked = _asked.decode(channel.receive(timeout_s).header)
    except msgspec.DecodeError as error:
        raise PeerLost(f"what came is no question about KV: {error}") from error
    layer = 0
    while (found := find(asked, layer)) is not None:
        layers, tensor = found
        header = KvFound(layers=layers, tensor=header_of(tensor))
        channel.send(Frame(_encoder.encode(header), bytes_of(tensor)), timeout_s)
        layer = layers.stop
    channel.send(Frame(_encoder.encode(KvNone()), _NOTHING), timeout_s)
    while not channel.lost:
        channel.receive(timeout_s)


KV_DIMENSIONS = 5
"""Of a piece's tensor."""
