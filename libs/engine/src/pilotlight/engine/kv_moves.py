"""KV that leaves a stage, with its requests or for others with the same tokens, and comes to one
with them.
"""

from collections.abc import Sequence

from torch import Tensor

from pilotlight.engine.core.batch import Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import BadRequest, NoRoom, PeerLost, UnknownInstance
from pilotlight.engine.kv_pieces import KvPiece, check_pieces, covered_tokens
from pilotlight.engine.pipeline.frames import settled
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey

READ_BYTES = 8 << 20
"""Of KV that is read between two steps: a batch waits for no more than that."""
DEVICE_READ_BYTES = 32 << 20
"""Of KV that stays on its device: copied there in less time."""


def export(
    resident: ResidentStage, keys: Sequence[RequestKey], layers: Stage, since: int
) -> tuple[KvPiece, ...]:
    """Copies the KV that requests have in some layers of a stage; all of them go on.

    A request that owns no blocks, or has nothing from ``since`` on, gives nothing. A stage that
    does not lead has what it has run so far, which may be less than the stages before it.

    Args:
        resident: the stage.
        keys: the requests.
        layers: of the model, within the stage.
        since: the first position that is copied.

    Raises:
        BadRequest: the layers are not the stage's.
    """
    if not resident.stage.start <= layers.start < layers.stop <= resident.stage.stop:
        raise BadRequest(
            f"layers [{layers.start}, {layers.stop}) are not within [{resident.stage.start}, {resident.stage.stop})"
        )
    segments = ((key, _placed(resident, key)) for key in keys)
    return tuple(
        KvPiece(
            key=key,
            layers=layers,
            start=since,
            keys_and_values=resident.kv.read(layers, segment.blocks, since, segment.stop),
        )
        for key, segment in segments
        if segment is not None and segment.stop > since
    )


def _placed(resident: ResidentStage, key: RequestKey) -> Segment | None:
    if resident.pipeline is not None:
        return resident.pipeline.placed(key)
    request = resident.scheduler.find(key)
    return resident.scheduler.placed(request) if request is not None else None


def shared(
    resident: ResidentStage | None, token_ids: Sequence[int], layer: int, *, on_device: bool
) -> tuple[Stage, Tensor] | None:
    """Copies what a whole model has in place of the longest prefix of some tokens, from one layer
    on: as many layers as a step may wait for.

    What a request had that has just left is there, for as long as no other one takes its blocks:
    each call looks anew.

    Args:
        resident: the stage; None: there is no such one.
        token_ids: of a prompt and its output.
        layer: the first one.
        on_device: the copies stay on the stage's device; else they come to the host's memory.

    Returns:
        The layers, and the keys and values of whole blocks as in ``KvPiece``; None: there are none.
    """
    if resident is None:
        return None
    spec = resident.spec
    if resident.pipeline is not None or resident.stage != spec.whole or layer >= spec.num_layers:
        return None
    blocks = resident.tables.find(token_ids)
    if not blocks:
        return None
    tokens = len(blocks) * BLOCK_TOKENS
    per_layer = tokens * spec.kv_bytes_per_token(Stage(layer, layer + 1), resident.dtype)
    at_once = DEVICE_READ_BYTES if on_device else READ_BYTES
    layers = Stage(layer, min(layer + max(1, at_once // per_layer), spec.num_layers))
    copies = resident.kv.copy(layers, blocks, 0, tokens)
    return layers, settled(copies) if on_device else copies.cpu()


def adopt(
    resident: ResidentStage, request: Request, pieces: Sequence[KvPiece], now_s: float
) -> None:
    """Takes up a request whose keys and values were computed elsewhere.

    Args:
        resident: the stage that runs it from now on.
        request: checked before (``ResidentStage.check``), and not submitted.
        pieces: what ``export`` gave of it, of all layers. What they lack at the end runs here.
        now_s: on the engine's clock.

    Raises:
        UnknownInstance: not every part is in place.
        BadRequest: the pieces are of another model.
        NoRoom: there is no room for it now. Added without pieces, it would wait.
    """
    if not resident.complete:
        raise UnknownInstance(f"{resident.instance_id} is still loading")
    # Blocks may be given out that one of its ended requests had: its rows would be written there.
    resident.forget_batch()
    check_pieces(pieces, resident.spec, resident.dtype)
    stop = min(covered_tokens(pieces, resident.spec.whole), len(request.token_ids) - 1)
    segment = resident.scheduler.adopt(request, now_s)
    if segment is None:
        raise NoRoom(f"{resident.instance_id} has no room now to take a running request over")
    for piece in pieces:
        # Also into layers that the stage is to take over: nothing of this request is copied there
        # later.
        if cut := piece.cut(resident.memory.stage, segment.start, stop):
            resident.kv.write(cut.layers, segment.blocks, cut.start, cut.keys_and_values)
    if resident.pipeline is not None:
        behind = Stage(resident.stage.stop, resident.spec.num_layers)
        cuts = (piece.cut(behind, segment.start, stop) for piece in pieces)
        try:
            resident.pipeline.forward(segment, [cut for cut in cuts if cut])
        except PeerLost:
            resident.scheduler.end(request, RequestEvent.DROP)
            raise
    request.computed = max(segment.start, stop)
