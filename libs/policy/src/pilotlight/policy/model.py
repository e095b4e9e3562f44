"""What a model is: its checkpoint, the stages it can be cut into, and what its owner asks for."""

from dataclasses import dataclass
from enum import StrEnum
from zlib import crc32

from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.pooling import EncoderSpec, Pooling, Task

SLOTS = 16
"""Ranges of addresses that a device has for models, each for one at a time."""


class EngineKind(StrEnum):
    """What runs a model. Which devices there are is another question: see ``DeviceKind``."""

    NATIVE = "native"
    """The engine of this project."""
    SIM = "sim"
    """Timings and tokens without a meaning: nothing is computed."""


class Dtype(StrEnum):
    """Element types that a checkpoint may hold; an engine computes in ``RUN_DTYPES``."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT8 = "float8_e4m3fn"
    """Of quantized weights alone, which come with scales: see ``Quantization``."""

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _DTYPE_BYTES[self.value]


_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}

RUN_DTYPES = (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32, Dtype.FLOAT64)
"""Element types that an engine computes in: of activations and KV."""

SCALE_BLOCK = 128
"""Rows and columns of a weight that share a scale, where scales are by block; as many activations
of a token share one then."""


class ScaleKind(StrEnum):
    """What of a quantized weight shares a scale."""

    BLOCK = "block"
    """``SCALE_BLOCK`` rows of as many columns."""
    CHANNEL = "channel"
    """One row."""
    TENSOR = "tensor"
    """All of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Weights in fp8 (e4m3), as published: every projection of every layer has them; embedding,
    head, norms, biases and routers do not.

    A weight is its stored value times its scale. Activations are quantized as they come, each token
    by itself: by groups of ``SCALE_BLOCK`` with scales by block, otherwise as one.

    On a device scales are float32, and one by tensor stands once for each row; weights are as they
    are stored, whatever the engine computes in.
    """

    scales: ScaleKind
    scale_dtype: Dtype
    """As scales are stored."""
    scale_suffix: str
    """``weight_scale_inv`` or ``weight_scale``: what a scale's name has in place of ``weight``."""
    stored_bytes: tuple[int, ...] = ()
    """Bytes of each part's quantized weights and their scales in the checkpoint, ..."""
    placed_bytes: tuple[int, ...] = ()
    """... and on a device."""

    def covers(self, name: str) -> bool:
        """Whether a tensor is a quantized weight; by its name in its part or in the checkpoint."""
        return name.endswith("_proj.weight")

    def scale_of(self, name: str) -> str:
        """The name of a quantized weight's scale."""
        return name.removesuffix("weight") + self.scale_suffix

    def is_scale(self, name: str) -> bool:
        """Whether a tensor is a scale."""
        return name.endswith(f"_proj.{self.scale_suffix}")

    def stored_scale_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Shape of the stored scale of a weight [rows, width]."""
        match self.scales:
            case ScaleKind.BLOCK:
                return (-(-rows // SCALE_BLOCK), -(-width // SCALE_BLOCK))
            case ScaleKind.CHANNEL:
                return (rows, 1)
            case ScaleKind.TENSOR:
                return (1,)

    def placed_scale_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """The same on a device."""
        return (
            (rows, 1) if self.scales is ScaleKind.TENSOR else self.stored_scale_shape(rows, width)
        )

    def stored_dtype(self, name: str, dtype: Dtype) -> Dtype:
        """Element type of a tensor in the checkpoint, where ``dtype`` is that of those that are not
        quantized.
        """
        if self.covers(name):
            return Dtype.FLOAT8
        return self.scale_dtype if self.is_scale(name) else dtype

    def placed_dtype(self, name: str, dtype: Dtype) -> Dtype:
        """Element type of a tensor on a device that computes in ``dtype``."""
        return Dtype.FLOAT32 if self.is_scale(name) else self.stored_dtype(name, dtype)


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """The layer range [start, stop) that one worker of an instance holds.

    ::

        layers   0   1   2   3   4   5
                 [0 ....... 3)              Stage(0, 3): embedding and layers 0, 1, 2
                             [3 ....... 6)  Stage(3, 6): layers 3, 4, 5 and the head
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a stage needs 0 <= start < stop, not [{self.start}, {self.stop})")

    @property
    def num_layers(self) -> int:
        """Decoder layers in the range."""
        return self.stop - self.start

    def is_within(self, other: "Stage") -> bool:
        """All layers of the range are the other's, too."""
        return other.start <= self.start and self.stop <= other.stop


class RopeKind(StrEnum):
    """Ways to stretch rotary embeddings over a longer context than a model was trained on first."""

    LLAMA3 = "llama3"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies of rotary embeddings are changed.

    What a kind has no use for keeps its default.
    """

    factor: float
    low_freq_factor: float = 0.0
    """Of ``LLAMA3``, as is the next."""
    high_freq_factor: float = 0.0
    original_max_position_tokens: int = 0
    """Of ``LLAMA3`` and ``YARN``: the context before stretching."""
    kind: RopeKind = RopeKind.LLAMA3
    beta_fast: float = 32.0
    """Of ``YARN``, as are those that follow: turns within the original context above which a
    frequency stays as it is."""
    beta_slow: float = 1.0
    """Turns below which a frequency is divided by the whole factor."""
    attention_factor: float = 1.0
    """What rotated queries and keys are multiplied with."""
    truncate: bool = True
    """The bounds that follow from the betas are rounded to whole dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward networks of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalized: bool
    """The shares of a token's experts are made to add up to 1."""
    layers: tuple[int, ...]
    """Layers that have experts; the others have one network of ``ModelSpec.intermediate_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a checkpoint is, read from its configuration and headers.

    Nothing here is an operator's choice.

    ``part_bytes`` has ``num_layers + 2`` entries in execution order: the embedding, each decoder
    layer, the head (final norm and output projection). Embedding and head are not split; a tied
    embedding lies in part 0 alone.

    A field with a default came with a later release. Its default is what models had before: such a
    model's digest does not change with the release.
    """

    architecture: str
    dtype: Dtype
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tied_embeddings: bool
    attention_bias: bool
    part_bytes: tuple[int, ...]
    sliding_window_tokens: int | None = None
    """How many tokens a query of a sliding layer sees, its own among them."""
    sliding_layers: tuple[int, ...] = ()
    """Layers with that window; the others see the whole context."""
    sliding_rope_theta: float | None = None
    """Of the sliding layers, whose frequencies are then not scaled; None: they turn as the others
    do."""
    attention_scale: float | None = None
    """What attention scores are multiplied with; None: 1 / sqrt(head_dim)."""
    logit_softcap: float | None = None
    """Logits are bent into (-cap, cap) by cap * tanh(logit / cap)."""
    experts: Experts | None = None
    quantization: Quantization | None = None
    """None: every tensor is of ``dtype``; otherwise those are that are not quantized."""
    pooling: Pooling | None = None
    """How it makes vectors or scores; None: it generates text."""
    encoder: EncoderSpec | None = None
    """None: a decoder, whose tokens see those before them alone."""
    tensor_prefix: str = "model."
    """What the checkpoint puts before the names of its tensors, those of heads excepted."""

    @property
    def task(self) -> Task:
        """What it is for."""
        return Task.GENERATE if self.pooling is None else self.pooling.task

    @property
    def whole(self) -> Stage:
        """The stage that holds every layer."""
        return Stage(0, self.num_layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(self.part_bytes)

    def parts_of(self, stage: Stage) -> tuple[int, ...]:
        """Parts that a stage needs, in execution order.

        Part 0 is the embedding (first stage; the last stage too when it is tied to the head), part
        1 + l is layer l, and part ``num_layers + 1`` is the head (last stage).
        """
        first = (
            (0,)
            if stage.start == 0 or (self.tied_embeddings and stage.stop == self.num_layers)
            else ()
        )
        last = (self.num_layers + 1,) if stage.stop == self.num_layers else ()
        return (*first, *range(1 + stage.start, 1 + stage.stop), *last)

    def stage_bytes(self, stage: Stage) -> int:
        """Bytes of the parameters that a stage holds, as stored."""
        return sum(self.part_bytes[part] for part in self.parts_of(stage))

    def kv_bytes_per_token(self, stage: Stage, dtype: Dtype) -> int:
        """Bytes of keys and values that one token takes in a stage's layers."""
        return 2 * stage.num_layers * self.num_kv_heads * self.head_dim * dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a model must meet: time to first token, time per output token, and for which share of
    its requests.
    """

    ttft_ms: float
    tpot_ms: float
    attainment: float = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingBounds:
    """How many instances a model may have, and how long an idle one is kept."""

    min_instances: int = 0
    max_instances: int = 1
    keep_alive_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A registered checkpoint: what it is, where it lies, what its owner asks for."""

    name: ModelName
    uri: str
    revision: str | None
    source_version: str
    """Pinned version of the source: file sizes and times, an S3 ETag, a hub commit."""
    digest: Digest
    """Digest of the manifest without chunk digests; also the manifest's key in the object store."""
    text_digest: Digest
    """Key of the text bundle (tokenizer, chat template, generation defaults)."""
    dtype: Dtype
    """Element type that the engine runs in."""
    spec: ModelSpec
    slo: Slo
    scaling: ScalingBounds
    pinned: bool = False
    keep_host_copy: bool = True
    engine: EngineKind = EngineKind.NATIVE
    """Models of an earlier release have the default, too."""

    @property
    def slot(self) -> int:
        """The range of addresses in which the model lies on every device, where no other model lies
        there already.

        It follows from the checkpoint and the dtype alone, so every process knows it and nothing
        has to store it.
        """
        return crc32(f"{self.digest} {self.dtype.value}".encode()) % SLOTS

    def part_device_bytes(self, part: int) -> int:
        """Bytes of one part's parameters on a device, in the dtype that the engine runs in."""
        return self._device_bytes((part,))

    def device_bytes(self, stage: Stage) -> int:
        """Bytes of a stage's parameters on a device, in the dtype that the engine runs in."""
        return self._device_bytes(self.spec.parts_of(stage))

    def _device_bytes(self, parts: tuple[int, ...]) -> int:
        spec, quantization = self.spec, self.spec.quantization
        converted_bytes = sum(spec.part_bytes[part] for part in parts)
        placed_bytes = 0
        if quantization is not None:
            converted_bytes -= sum(quantization.stored_bytes[part] for part in parts)
            placed_bytes = sum(quantization.placed_bytes[part] for part in parts)
        return placed_bytes + converted_bytes * self.dtype.size_bytes // spec.dtype.size_bytes
