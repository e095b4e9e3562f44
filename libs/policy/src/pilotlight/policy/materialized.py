"""Materialized state: what a start would compute, computed once (MEDUSA, sections 3 to 5).

An artifact is valid for one fingerprint: everything that its contents depend on. A start uses it
only if every field is equal; the first that differs is what is told.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.ids import Digest
from pilotlight.policy.model import Dtype, Model, Stage

FORMAT = 1
"""Of artifacts; others are refused."""
GRAPHS = "graphs"
"""The kind of blob that holds captured steps and their kernels."""
MAX_GRAPHS_BYTES = 128 << 20
"""Of such a blob. 35 graphs of 600 nodes with the kernels that they use have some 20 MiB."""
COMPILE_CACHE = "compile_cache"
"""The kind of blob that holds what the kernels' compiler made."""
MAX_COMPILE_CACHE_BYTES = 64 << 20
"""Of such a blob. A model has some 20 kernels of tens of kilobytes."""
RANGE_GRAPHS = "range_graphs"
"""The beginning of the kinds of blobs that hold those of a range of layers: ``range_kind``."""
MAX_RANGES = 8
"""Of an artifact."""
_RANGE_KIND = re.compile(RANGE_GRAPHS + r"_(0|[1-9][0-9]{0,4})_([1-9][0-9]{0,4})")
_MOST_BYTES = {
    GRAPHS: MAX_GRAPHS_BYTES,
    RANGE_GRAPHS: MAX_GRAPHS_BYTES,
    COMPILE_CACHE: MAX_COMPILE_CACHE_BYTES,
}


def range_kind(layers: Stage) -> str:
    """The kind of blob that holds the graphs of a range of layers."""
    return f"{RANGE_GRAPHS}_{layers.start}_{layers.stop}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What an engine runs on, as its process says."""

    engine: str
    """Release, and a digest of the engine's sources."""
    device_kind: DeviceKind
    device_name: str
    memory_bytes: int
    """Of the device; 0 for cores, whose memory is a setting."""
    driver: str
    cuda: str
    torch: str
    kernels: str
    """Version of the library that compiles kernels."""
    arena_address: int
    granule_bytes: int
    step_tokens: int
    """Tokens of a forward pass, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that an artifact's validity depends on (design 8)."""

    environment: Environment
    model_digest: Digest
    dtype: Dtype
    slot: int
    max_context_tokens: int

    @classmethod
    def of(cls, environment: Environment, model: Model) -> "Fingerprint":
        """That of a model in an environment."""
        return cls(
            environment=environment,
            model_digest=model.digest,
            dtype=model.dtype,
            slot=model.slot,
            max_context_tokens=model.spec.max_context_tokens,
        )

    @property
    def digest(self) -> Digest:
        """Its name: 64 hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return Digest(hashlib.blake2b(text.encode(), digest_size=32).hexdigest())


_Facts = TypeVar("_Facts", "Fingerprint", "Environment", "CompiledFor")


def first_difference(ours: Fingerprint, theirs: Fingerprint) -> str | None:
    """The name of the first field in which two fingerprints differ; None: they are equal."""
    of_model = _differs(ours, theirs, skip="environment")
    return of_model or _differs(ours.environment, theirs.environment)


def _differs(ours: _Facts, theirs: _Facts, skip: str = "") -> str | None:
    names = (one.name for one in fields(ours) if one.name != skip)
    return next((name for name in names if getattr(ours, name) != getattr(theirs, name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How device memory was divided when the artifact was made.

    ::

        device_bytes  [ parameter_bytes | kv_capacity_tokens * kv_bytes_per_token | waste ]
    """

    device_bytes: int
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int

    def admits(self, device_bytes: int, kv_capacity_tokens: int) -> bool:
        """Whether a stage that was given other bytes is consistent with this layout: MEDUSA's
        invariant (section 4), which a start with more or less free memory keeps by computing the
        room from the recorded division, never by profiling.

        Args:
            device_bytes: that the stage has.
            kv_capacity_tokens: that it found room for.
        """
        if device_bytes == self.device_bytes:
            return kv_capacity_tokens == self.kv_capacity_tokens
        if device_bytes < self.device_bytes:
            return kv_capacity_tokens <= self.kv_capacity_tokens
        return kv_capacity_tokens >= self.kv_capacity_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """t_p: a prompt of so many tokens, alone, through all layers."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """t_d: one token for each request of a batch."""

    batch: int
    context_tokens: int
    """Of each request."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Timings of a model on a device, measured in MEDUSA's offline phase (section 3)."""

    load_bytes_per_s: float
    """From the host pool to the device, as the engine's probe found it, of no model."""
    prefill: tuple[PrefillTime, ...]
    decode: tuple[DecodeTime, ...]
    load_s: float = 0.0
    """What the model's parameters took from the host pool to the device in the build's own load
    (``coverage.LoadSeconds``, as of the next two); 0: not measured."""
    init_s: float = 0.0
    """What that load took beside them, without the artifact; 0: not measured."""
    restore_s: float = 0.0
    """What the load of a second process took beside them, with the artifact; 0: not measured."""

    def model_bytes_per_s(self, device_bytes: int) -> float:
        """From the host pool to the device, as the model itself showed it; 0: not measured.

        Args:
            device_bytes: of its parameters, as they lie on the device.
        """
        return device_bytes / self.load_s if self.load_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A prompt, and what the model made of it when the artifact was built: most probable tokens,
    which every restore must give again.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A part of an artifact that is an object of its own."""

    kind: str
    digest: Digest
    size_bytes: int

    @property
    def holds(self) -> str:
        """Its kind; of the graphs of any range, ``RANGE_GRAPHS``."""
        return RANGE_GRAPHS if _RANGE_KIND.fullmatch(self.kind) else self.kind

    @property
    def most_bytes(self) -> int:
        """That an engine reads of its kind; 0 of a kind that engines do not read."""
        return _MOST_BYTES.get(self.holds, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one captured step gave for its trial: a fixed step that neither reads nor writes the
    cache (``engine.cuda.trials``).
    """

    rows: int
    digest: str
    """Of every bit of its logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlace:
    """Something that captured steps read or write at a fixed place."""

    name: str
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLayout:
    """Where captured steps expect everything, and what each of them gave.

    The graphs themselves are the blob of kind ``GRAPHS``.
    """

    slot: int
    """Of the arena."""
    places: tuple[GraphPlace, ...]
    """What the steps read and write beside parameters and KV."""
    pool_bytes: int
    """Of the slot's graph pool, from its beginning: all that a step writes in passing."""
    trials: tuple[Trial, ...]
    """One for each decode step's graph, rows rising."""
    prompts: tuple[Trial, ...] = ()
    """The same of one prompt alone."""
    prompts_refused: str = ""
    """Why prompts are missing, by name."""

    @property
    def digests(self) -> dict[int, str]:
        """What each graph gave, by what the archive knows it by."""
        prompts = {prompt_size(trial.rows): trial.digest for trial in self.prompts}
        return {trial.rows: trial.digest for trial in self.trials} | prompts

    @property
    def addresses(self) -> dict[str, int]:
        """Of all places, by name."""
        return {place.name: place.address for place in self.places}

    def differs(self, slot: int, places: Mapping[str, int]) -> str | None:
        """The name of the first place that is elsewhere here; None: all are where they were.

        Args:
            slot: that the stage lies in.
            places: as its steps have them.
        """
        if slot != self.slot:
            return "slot"
        recorded = self.addresses
        names = sorted({*recorded, *places})
        return next((name for name in names if recorded.get(name) != places.get(name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeGraphs:
    """Graphs of stages that hold a range of layers; they are the blob of kind ``range_kind``."""

    layers: Stage
    graphs: GraphLayout | None = None
    """None: there are none."""
    refused: str = ""
    """Why not, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFor:
    """What compiled kernels fit, beside their artifact's fingerprint: the parts of it that decide
    whether the compiler finds them, and whether the machine takes them.
    """

    compiler: str
    """Name and version."""
    processor: str
    """Of the device."""
    python: str
    """How its extensions end: what launches kernels is one."""
    libc: str
    """Which that is linked to."""

    def differs(self, other: "CompiledFor") -> str | None:
        """The name of the first field that differs; None: they are equal."""
        return _differs(self, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The manifest of one artifact."""

    format: int
    fingerprint: Fingerprint
    layout: Layout
    profile: Profile
    canary: Canary
    blobs: tuple[Blob, ...] = ()
    """Graphs with their kernels, and compiled kernels; none where nothing is captured."""
    graphs: GraphLayout | None = None
    """Of the graphs, where there are any."""
    graphs_refused: str = ""
    """Why there are none on a device that could have them, by name."""
    compiled: CompiledFor | None = None
    """Of the compiled kernels, where there are any."""
    compiled_refused: str = ""
    """Why there are none on a device whose kernels are compiled, by name."""
    ranges: tuple[RangeGraphs, ...] = ()
    """Of stages of groups, where they were wanted."""

    @property
    def graphs_blob(self) -> Blob | None:
        """The graphs' object."""
        return self._blob(GRAPHS)

    @property
    def compiled_blob(self) -> Blob | None:
        """The compiled kernels' object."""
        return self._blob(COMPILE_CACHE)

    def graphs_of(self, layers: Stage) -> tuple[GraphLayout, Blob] | None:
        """The graphs of a range that is not the whole model; None: there are none."""
        found = next((one.graphs for one in self.ranges if one.layers == layers), None)
        blob = self._blob(range_kind(layers))
        return None if found is None or blob is None else (found, blob)

    def wrong_ranges(self) -> str:
        """What the ranges say that their blobs do not, or the other way round; empty: nothing."""
        listed = [range_kind(one.layers) for one in self.ranges]
        if len(listed) > MAX_RANGES or len({*listed}) != len(listed):
            return f"there are {len(listed)} ranges, each once and {MAX_RANGES} at most"
        named = {range_kind(one.layers) for one in self.ranges if one.graphs is not None}
        kept = [one.kind for one in self.blobs if one.holds == RANGE_GRAPHS]
        return (
            "" if sorted(kept) == sorted(named) else "a range has graphs and a layout, or neither"
        )

    def _blob(self, kind: str) -> Blob | None:
        return next((one for one in self.blobs if one.kind == kind), None)
