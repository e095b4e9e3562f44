"""Whether recorded graphs fit a stage: everything that they expect of it, looked at before the
driver is asked for a graph.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotlight.engine.cuda.graph_device import GraphDevice
from pilotlight.engine.cuda.graphs import SIZES, Kind, StageSteps
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.faults import out_of_memory
from pilotlight.native.library import AddressTaken, NativeError
from pilotlight.policy.materialized import GraphLayout

DIGEST = re.compile(r"[0-9a-f]{64}")
"""Of a trial's logits."""
SEGMENT_BYTES, LEAST_BYTES = 2 << 20, 20 << 20
"""torch takes segments in multiples of the one; what is as long as the other has its own."""


class GraphsRefused(Exception):
    """Graphs are not restored; ``field`` says what is wrong with them. No graph was made."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreNews:
    """How far a stage's graphs are."""

    ready: int = 0
    proved: int = 0
    """As many have given what was recorded; each does before its first use."""
    refused: str = ""
    """By name, why none comes (any more)."""
    message: str = ""

    @classmethod
    def of(cls, ready: int, proved: int, why: GraphsRefused | NativeError | None) -> "RestoreNews":
        """Those of one range.

        Args:
            ready: graphs.
            proved: see above.
            why: no more of them come; None: they do, or all have come.
        """
        field = why.field if isinstance(why, GraphsRefused) else "driver" if why else ""
        return cls(ready=ready, proved=proved, refused=field, message=str(why or ""))

    def with_those(self, other: "RestoreNews") -> "RestoreNews":
        """Of two ranges of one stage."""
        return RestoreNews(
            ready=self.ready + other.ready,
            proved=self.proved + other.proved,
            refused=self.refused or other.refused,
            message=self.message or other.message,
        )


def check_layout(
    layout: GraphLayout, memory: StageMemory, steps: StageSteps, *, later: bool = False
) -> None:
    """Whether a stage has everything where its graphs expect it.

    Args:
        layout: of the graphs.
        memory: the stage's.
        steps: the stage's.
        later: it need not have memory for all of the layers yet.

    Raises:
        GraphsRefused: by the name of what differs.
    """
    if not steps.has_trials or not (steps.present or later):
        raise GraphsRefused("steps", "the stage has no steps that graphs are restored for")
    rows = [trial.rows for trial in layout.trials]
    lengths = [trial.rows for trial in layout.prompts]
    known = rows == sorted({*rows} & {*SIZES}) and lengths == sorted({*lengths} & {*LENGTHS})
    digests = all(DIGEST.fullmatch(digest) for digest in layout.digests.values())
    if not rows or not known or not digests:
        raise GraphsRefused(
            "trials",
            f"trials of {rows} rows and prompts of {lengths} are none that could be recorded",
        )
    most_bytes = memory.arena.pool_bytes
    if not 0 < layout.pool_bytes <= most_bytes:
        raise GraphsRefused(
            "pool", f"a graph pool has 1 to {most_bytes} bytes, not {layout.pool_bytes}"
        )
    places = places_of(steps)
    field = layout.differs(memory.slot_number, places)
    if field is not None:
        recorded = {**layout.addresses, "slot": layout.slot}
        here = {**places, "slot": memory.slot_number}
        # A name that nobody knows would be whatever the manifest says.
        raise GraphsRefused(
            field if field in here else "places",
            f"{field} is {here.get(field)} here, and {recorded.get(field)} was recorded",
        )


@dataclass(frozen=True, slots=True)
class Fitting:
    """What graphs are to fit."""

    layout: GraphLayout
    """Of the graphs."""
    memory: StageMemory
    scratch: Scratch
    """The slot's."""
    steps: StageSteps
    later: bool
    """The stage need not have memory for all of the layers yet."""


Fit = Callable[[Fitting], Tensor | None]
"""Looks whether graphs fit a stage, and takes what they need of the graph pool; gives what keeps
torch from giving that to anything else, or raises ``GraphsRefused``."""


def fitted(fitting: Fitting) -> Tensor | None:
    """A ``Fit``, of graphs that know everything by its address."""
    memory, steps = fitting.memory, fitting.steps
    check_layout(fitting.layout, memory, steps, later=fitting.later)
    return reserve(fitting.layout, memory, fitting.scratch, steps)


def reserve(
    layout: GraphLayout, memory: StageMemory, scratch: Scratch, steps: StageSteps
) -> Tensor | None:
    """Has memory behind all of the graph pool that the graphs know.

    Args:
        layout: of the graphs.
        memory: the stage's.
        scratch: the slot's.
        steps: the stage's.

    Returns:
        What keeps torch from giving it to anything else.

    Raises:
        GraphsRefused: ``pool``: there is none.
    """
    pool, logits = scratch.graphs, steps.logits()
    first = memory.graph_pool_bytes(1).data_ptr()
    held = (logits.data_ptr() + logits.nbytes - first) // SEGMENT_BYTES * SEGMENT_BYTES
    left, rest = layout.pool_bytes - held, None
    try:
        # What a plan behind this one has taken is there for both: one graph runs at a time.
        if left > 0 and pool.mapped_bytes < layout.pool_bytes:
            with pool.use():
                rest = torch.empty(max(left, LEAST_BYTES), dtype=torch.uint8, device=logits.device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise GraphsRefused("pool", f"the device has no memory for graphs: {error}") from error
    if pool.mapped_bytes < layout.pool_bytes:
        raise GraphsRefused(
            "pool",
            f"the graph pool has {pool.mapped_bytes} bytes, and the graphs use {layout.pool_bytes}",
        )
    return rest


def opened(
    open_archive: Callable[[StageMemory, bytes], GraphDevice],
    memory: StageMemory,
    archive: bytes,
    wanted: Collection[int],
) -> GraphDevice:
    """An archive on the device of a stage's memory.

    Args:
        open_archive: reads one.
        memory: the stage's.
        archive: its bytes.
        wanted: what it must have. What else it has is a later release's.

    Raises:
        GraphsRefused: it is for another arena, does not hold together, or lacks some.
    """
    try:
        device = open_archive(memory, archive)
    except AddressTaken as error:
        raise GraphsRefused("arena_address", str(error)) from error
    except NativeError as error:
        raise GraphsRefused("archive", str(error)) from error
    if missing := {*wanted} - {*device.tags}:
        device.close()
        raise GraphsRefused("sizes", f"the archive has no graphs of the sizes {sorted(missing)}")
    return device


def places_of(steps: StageSteps) -> dict[str, int]:
    """Addresses of all that a stage's captured steps read and write, but for parameters, KV and
    what they write in passing.
    """
    return {**steps.places, "logits": steps.logits().data_ptr()}


def named(kind: Kind) -> str:
    """A kind of steps, as messages say it."""
    return f"prompts of {kind.rows} rows" if kind.prompt else f"{kind.rows} rows"
