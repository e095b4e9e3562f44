"""What a start is given of an artifact."""

from dataclasses import dataclass, field

from pilotlight.common.messages.graphs import GraphWays, RangeFile
from pilotlight.common.messages.hold import Hold
from pilotlight.policy.cost import may_be_whole
from pilotlight.policy.materialized import Artifact, Blob


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage is restored from."""

    manifest: bytes = b""
    """As it was signed; empty: there is none that is valid."""
    graphs: str = ""
    """Where the whole model's archive of graphs is; empty: it has none, or it is not here yet."""
    kernels: str = ""
    """The same of its compiled kernels."""
    ranges: tuple[RangeFile, ...] = ()
    """The same of the graphs of its own range, where it is a stage of a group."""
    uses: dict[int, int] = field(default_factory=dict[int, int])
    """How often steps of each size of graph ran when the model was here before."""
    ways: GraphWays = field(default_factory=GraphWays)
    """How its graphs are restored."""


@dataclass(frozen=True, slots=True)
class StageBlobs:
    """What a stage is given of an artifact's blobs."""

    graphs: Blob | None = None
    """Of the whole model."""
    ranged: Blob | None = None
    """Graphs of its own range."""
    kernels: Blob | None = None


def is_whole(hold: Hold) -> bool:
    """The stage is the whole model, and in no group."""
    return hold.stage == hold.model.spec.whole and len(hold.members) <= 1


def may_grow(hold: Hold) -> bool:
    """A stage of a group has the memory of the whole model, which it is to become in it."""
    return bool(hold.members) and may_be_whole(hold.model, hold.stage, hold.device_bytes)


def has_a_range(hold: Hold) -> bool:
    """The stage holds a part of the model's layers."""
    return hold.stage != hold.model.spec.whole


def blobs_of(artifact: Artifact, hold: Hold) -> StageBlobs:
    """What a stage is given of an artifact: the whole model's graphs where it is that or may become
    it, those of its range where it has one, and compiled kernels, which are the same for any range,
    with either of them.
    """
    found = artifact.graphs_of(hold.stage) if has_a_range(hold) else None
    ranged = None if found is None else found[1]
    of_whole = is_whole(hold) or may_grow(hold)
    return StageBlobs(
        graphs=artifact.graphs_blob if of_whole and artifact.graphs is not None else None,
        ranged=ranged,
        kernels=artifact.compiled_blob
        if artifact.compiled is not None and (of_whole or ranged is not None)
        else None,
    )
