"""Worker and its engine child: graphs and compiled kernels that are recorded, and those that are
restored.

Archives do not go through frames. The worker makes a file that nobody else can name
(``worker.graph_files``) and says where it is.
"""

from typing import Literal

import msgspec

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.materialized import Blob, CompiledFor, GraphLayout
from pilotlight.policy.model import Stage


class GraphWays(Message, frozen=True, kw_only=True):
    """How graphs are recorded and restored: two ways that are there to be compared, and the usual
    ones.
    """

    pointers: Literal["addresses", "indirect"] = "addresses"
    """Parameters are restored as they are, or by what their addresses point to."""
    kernels: Literal["images", "symbol", "trigger"] = "images"
    """Where those of restored graphs come from; from images, what cannot be had otherwise."""
    witness: str = ""
    """Where the archive of a process is that recorded the same graphs with its arena elsewhere;
    empty: this recording is to be one."""


class RangeFile(Message, frozen=True, kw_only=True):
    """Where an archive of the graphs of a range of layers is, or is to be written."""

    layers: Stage
    path: str


class Precomputed(Message, frozen=True, kw_only=True):
    """What else there is for a stage on a GPU, and what is to come of it."""

    kernels: str = ""
    """Where the artifact's compiled kernels are; empty: there are none."""
    only: bool = False
    """No compiled kernels but these are used: to see which are missing."""
    record_kernels: str = ""
    """Where those that the process has used are to be written when the stage is unloaded; it notes
    them from its start on (``ChildOptions.note_kernels``)."""
    uses: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """How often steps of each size of graph ran when the model was here before."""
    launch_lists: bool = False
    """A step whose kernels are loaded does not wait for its graph."""
    ways: GraphWays = GraphWays()
    ranges: tuple[RangeFile, ...] = ()
    """Where graphs are recorded: those of ranges that are recorded, too. Otherwise that of the
    stage's range, if the artifact has any for it."""


class KernelsRecorded(Message, frozen=True, kw_only=True):
    """Compiled kernels that a process has used, with those of its start: an archive, or the name of
    what stands in its way.
    """

    made_for: CompiledFor | None = None
    blob: Blob | None = None
    """The archive, as it was written."""
    compiled: tuple[str, ...] = ()
    """What was compiled since the stage was loaded, because it was not there."""
    refused: str = ""
    message: str = ""


class StageKernels(Message, tag="kernels", frozen=True, kw_only=True):
    """What became of the compiled kernels of a stage's artifact."""

    instance_id: InstanceId
    restored: int = 0
    refused: str = ""
    """By name, why they are not used (any more): kernels are compiled as they are needed."""
    message: str = ""
    settled: bool = False
    """They have given the stage's first token, or the stage is gone: what ends the engine from now
    on is not their fault."""


class ArchiveRecorded(Message, frozen=True, kw_only=True):
    """Graphs that were recorded: an archive, or the name of what stands in its way."""

    layout: GraphLayout | None = None
    blob: Blob | None = None
    """The archive, as it was written."""
    refused: str = ""
    message: str = ""


class RangeRecorded(ArchiveRecorded, frozen=True, kw_only=True):
    """What came of one of ``Precomputed.ranges``."""

    layers: Stage


class GraphsRecorded(ArchiveRecorded, frozen=True, kw_only=True):
    """What came of ``LoadStage.record``."""

    ranges: tuple[RangeRecorded, ...] = ()
    """Of those that were asked for; none where the whole model's are not recorded."""


class StageGraphs(Message, tag="graphs", frozen=True, kw_only=True):
    """How far the restored graphs of a stage are; told again when that changes."""

    instance_id: InstanceId
    ready: int = 0
    proved: int = 0
    """As many gave what was recorded; each does before its first use."""
    refused: str = ""
    """By name, why no (further) graph is restored: graphs are captured as they are used."""
    message: str = ""
    uses: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """How often steps of each size ran since this was told last: now and then, and when the stage
    goes."""
