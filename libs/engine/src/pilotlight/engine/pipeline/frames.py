"""What stages say to each other: headers in msgpack, tensors as their bytes."""

from math import prod

import msgspec
import torch
from torch import Tensor

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.sampler import NotSampled, SampledToken
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.sampling import Allowed
from pilotlight.policy.model import Dtype, ModelSpec, Stage
from pilotlight.policy.request import RequestKey, Sampling

DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """How to read the payload: row-major."""

    dtype: Dtype
    shape: tuple[int, ...]


class StageHello(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage is."""

    stage: Stage
    spec: ModelSpec
    dtype: Dtype
    num_blocks: int
    loading: bool = False
    """Parts of it are missing, or it is not known yet that they were whole: it answers later."""
    lends: bool = False
    """It passes on what is said of parts, and lends its own to a stage of its host."""
    held: Stage | None = None
    """In the ring of a shorter pipeline: what it runs while that forms; None: the same."""


class StagesUp(msgspec.Struct, tag="up", frozen=True, kw_only=True):
    """Goes round once, first of all: every stage adds itself."""

    stages: tuple[StageHello, ...]


class OpenedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the last stage will sample for, as it is before this batch."""

    key: RequestKey
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling


class HiddenStates(msgspec.Struct, tag="hidden", frozen=True, kw_only=True):
    """One micro-batch on its way.

    The payload is what the stage before gave: [num_tokens, hidden_size].
    """

    number: int
    """Counts the micro-batches of the pipeline."""
    keys: tuple[RequestKey, ...]
    """The request of each segment."""
    segments: tuple[Segment, ...]
    opened: tuple[OpenedRequest, ...]
    closed: tuple[RequestKey, ...]
    """Requests that ended or gave up their blocks; they come before those that are opened."""
    tensor: TensorHeader
    allowed: tuple[Allowed | None, ...]
    """What the grammars of the requests that get a token allow; None for those without one."""
    busy_s: float | None = None
    """What the stages before this frame took with it, but for the first one; None: some stage does
    not say, or waited for parts."""

    @property
    def batch(self) -> Batch:
        """What to run."""
        return Batch(self.segments)


class RequestsClosed(msgspec.Struct, tag="closed", frozen=True, kw_only=True):
    """Requests ended, and no micro-batch follows that could say so.

    It goes as far as the last stage, and needs no answer.
    """

    keys: tuple[RequestKey, ...]


class KvBlocks(msgspec.Struct, tag="kv", frozen=True, kw_only=True):
    """Keys and values of a request that moved here, for the layers behind the sender.

    The payload: [num_layers, 2, tokens, num_kv_heads, head_dim].
    """

    key: RequestKey
    layers: Stage
    blocks: tuple[int, ...]
    start: int
    """Position of the first token."""
    tensor: TensorHeader


class KvWanted(msgspec.Struct, tag="kv_wanted", frozen=True, kw_only=True):
    """The leader takes a layer over and wants KV blocks of it, as all batches before this frame
    left them.
    """

    layer: int
    blocks: tuple[int, ...]


class KvCopied(msgspec.Struct, tag="kv_copied", frozen=True, kw_only=True):
    """The blocks that were wanted, on their way to the leader.

    The payload: [1, 2, blocks * BLOCK_TOKENS, num_kv_heads, head_dim].
    """

    layer: int
    blocks: tuple[int, ...]
    tensor: TensorHeader


class PartWanted(msgspec.Struct, tag="part_wanted", frozen=True, kw_only=True):
    """The leader is to have a part, and would copy it from the device of who has it."""

    part: int
    form: bytes
    """As ``StageMemory.form``."""
    mailbox: str
    """Where descriptors come to."""


class LentChunk(msgspec.Struct, frozen=True, array_like=True):
    """Memory whose descriptor was posted; see ``Lent``."""

    num_bytes: int
    start: int
    stop: int


class PartLent(msgspec.Struct, tag="part_lent", frozen=True, kw_only=True):
    """Where the part lies, on its way to the leader; or why it cannot be copied."""

    part: int
    nonce: bytes = b""
    """With which the descriptors were posted, in the order of the chunks."""
    chunks: tuple[LentChunk, ...] = ()
    total: int = 0
    """As ``Lending.sum``, over the part's bytes."""
    why: str = ""
    """Empty: it can."""


class LeaderRuns(msgspec.Struct, tag="leader_runs", frozen=True, kw_only=True):
    """Goes round once: from now on the leader runs layers [0, stop), and the others what is left of
    theirs.

    A stage that has none left passes on what comes. With all layers at the leader the pipeline
    ends.
    """

    stop: int


class SampledTokens(msgspec.Struct, tag="sampled", frozen=True, kw_only=True):
    """What the last stage sampled for a micro-batch."""

    number: int
    sampled: tuple[SampledToken | NotSampled, ...] = msgspec.field(name="drawn")
    """The field's name in a frame is that of earlier releases."""
    busy_s: float | None = None
    """As in ``HiddenStates``, of all stages behind the first."""


class StageRefuses(msgspec.Struct, tag="refused", frozen=True, kw_only=True):
    """A stage cannot go on with this pipeline, and says why before it hangs up."""

    message: str


Header = (
    StagesUp
    | HiddenStates
    | RequestsClosed
    | KvBlocks
    | KvWanted
    | KvCopied
    | PartWanted
    | PartLent
    | LeaderRuns
    | SampledTokens
    | StageRefuses
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_NOTHING = memoryview(b"")


def header_of(tensor: Tensor) -> TensorHeader:
    """How a tensor travels."""
    return TensorHeader(DTYPES[tensor.dtype], tuple(tensor.shape))


def pack(header: Header, tensor: Tensor | None = None) -> Frame:
    """A frame. The tensor must not change afterwards; what a device computes of it has been
    computed when this returns.
    """
    return Frame(_encoder.encode(header), _NOTHING if tensor is None else bytes_of(settled(tensor)))


def bytes_of(tensor: Tensor) -> memoryview | Tensor:
    """A tensor as it travels: row-major, and where it lies, if that is a device. It must not change
    afterwards.
    """
    if not tensor.numel():
        return _NOTHING
    row = tensor.contiguous().view(-1).view(torch.uint8)
    return row if on_device(tensor) else row.numpy().data


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory of a device, and not in the host's."""
    return tensor.device.type != "cpu"


def settled(tensor: Tensor) -> Tensor:
    """The same tensor, in one piece, when what computes it on a device has done so."""
    tensor = tensor.contiguous()
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def kv_frame(segment: Segment, piece: KvPiece) -> Frame:
    """Keys and values of a request that moved here, in its blocks."""
    tensor = piece.keys_and_values.contiguous()
    header = KvBlocks(
        key=piece.key,
        layers=piece.layers,
        blocks=segment.blocks,
        start=piece.start,
        tensor=header_of(tensor),
    )
    return pack(header, tensor)


def unpack(frame: Frame) -> Header:
    """What a frame says.

    Raises:
        PeerLost: nothing that a stage would say.
    """
    try:
        return _decoder.decode(frame.header)
    except msgspec.DecodeError as error:
        raise PeerLost(f"a frame that no stage sends: {error}") from error


def tensor_of(frame: Frame, header: TensorHeader) -> Tensor:
    """A frame's tensor, on the device where the payload is; shares its memory.

    Raises:
        PeerLost: the payload is not as long as the header says.
    """
    size_bytes = prod(header.shape) * header.dtype.size_bytes
    if frame.payload.nbytes != size_bytes or any(length < 0 for length in header.shape):
        raise PeerLost(
            f"a frame of {frame.payload.nbytes} bytes comes for a tensor of {size_bytes}"
        )
    if not size_bytes:
        return torch.empty(header.shape, dtype=TORCH_DTYPES[header.dtype])
    if isinstance(frame.payload, Tensor):
        return frame.payload.view(TORCH_DTYPES[header.dtype]).view(header.shape)
    return torch.frombuffer(frame.payload, dtype=TORCH_DTYPES[header.dtype]).view(header.shape)
