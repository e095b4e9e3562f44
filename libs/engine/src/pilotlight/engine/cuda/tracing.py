"""Records a stage's graphs with what it takes to restore them elsewhere (``cuda.indirect``): which
memory was there when each was captured, and of each word that is an address what it points to.

Two processes record, their arenas at different places. The first one's archive has allocations
alone, and is the second one's witness; what differs between them, and not as memory does, is no
address.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from pilotlight.engine.cuda.graphs import SIZES, StageSteps
from pilotlight.engine.cuda.indirect import alive_segments, stage_allocations
from pilotlight.engine.cuda.pools import TorchPool
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.cuda.recording import GraphRecorder, NotRecorded
from pilotlight.engine.cuda.restored import POISON
from pilotlight.engine.cuda.traces import GIVEN, PERMANENT, TEMPORARY, with_addresses
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.device import SegmentEvent
from pilotlight.native.graphs import GraphDump
from pilotlight.native.library import NativeError
from pilotlight.native.pointers import NEVER, PointerTable, RecordedAllocation, with_pointers
from pilotlight.policy.graphs.trace import TraceRefused
from pilotlight.policy.materialized import MAX_GRAPHS_BYTES


class TracingRecorder(GraphRecorder):
    """A recorder whose archives can be restored at their addresses, and elsewhere."""

    def __init__(
        self,
        witness: bytes | None = None,
        sizes: Sequence[int] = SIZES,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        """Records nothing yet.

        Args:
            witness: what such a recorder has recorded of the same model in a process whose arena
                lies elsewhere; None: this archive is to be one, and says nothing of addresses.
            sizes: see ``GraphRecorder``.
            lengths: see ``GraphRecorder``.
        """
        super().__init__(sizes, lengths)
        self._witness = witness
        self._tags: list[int] = []
        self._counts: list[int] = []
        """Segments that were taken or given back before the first capture, and until the end of
        each.
        """
        self._kept: Tensor | None = None
        """Of the graph pool, as captures left it."""
        self._permanent: set[int] = set()
        """Addresses of segments in which graphs expect something."""

    def _captured(self, steps: StageSteps, size: int) -> str:
        if not self._counts:
            # Where all leave their logits; a process that restores has it before it has graphs.
            steps.logits()
            self._counts.append(len(self._events))
        try:
            return super()._captured(steps, size)
        finally:
            self._tags.append(size)
            self._counts.append(len(self._events))

    def _require_independent(
        self, steps: StageSteps, memory: StageMemory, pool_bytes: int, size: int, found: str
    ) -> None:
        """A graph that needs what an earlier one left is recorded with it: MEDUSA's permanent
        buffers, here the segments without which the graph gives other bits.
        """
        pool = memory.graph_pool_bytes(pool_bytes)
        if self._kept is None:
            self._kept = pool.cpu()
        try:
            super()._require_independent(steps, memory, pool_bytes, size, found)
        except NotRecorded as refused:
            if refused.field != "permanent":
                raise
            if not self._are_enough(steps, pool, size, found):
                raise

    def _are_enough(self, steps: StageSteps, pool: Tensor, size: int, found: str) -> bool:
        """Finds the segments that a graph needs; whether they are all that it needs."""
        assert self._kept is not None
        inner = alive_segments(self._events[: self._counts[-1]])
        first = pool.data_ptr()
        for one in inner:
            pool.copy_(self._kept)
            pool[one.address - first :][: one.num_bytes].fill_(POISON)
            if digest_of(steps.trial(size)) != found:
                self._permanent.add(one.address)
        pool.fill_(POISON)
        for one in inner:
            if one.address in self._permanent:
                at = one.address - first
                pool[at : at + one.num_bytes].copy_(self._kept[at : at + one.num_bytes])
        return digest_of(steps.trial(size)) == found

    def _dump(self, memory: StageMemory, steps: StageSteps, sizes: Sequence[int]) -> GraphDump:
        dump = super()._dump(memory, steps, sizes)
        table = PointerTable(tuple(self._allocations(memory)), tuple(self._tags))
        try:
            archive = with_pointers(dump.archive, table)
            if self._witness is not None:
                archive = with_addresses(archive, [self._witness])
        except TraceRefused as refused:
            raise NotRecorded(refused.what, str(refused)) from refused
        except NativeError as error:
            raise NotRecorded("pointers", str(error)) from error
        if len(archive) > MAX_GRAPHS_BYTES:
            raise NotRecorded("size", f"the graphs have {len(archive)} bytes")
        return replace(dump, archive=archive)

    @property
    def _events(self) -> Sequence[SegmentEvent]:
        assert self._scratch is not None
        assert isinstance(self._scratch.graphs, TorchPool)
        return self._scratch.graphs.memory.events

    def _allocations(self, memory: StageMemory) -> list[RecordedAllocation]:
        """The stage's memory, then the segments of its graph pool, in the order of time."""
        segments: list[RecordedAllocation] = []
        for number, event in enumerate(self._events[: self._counts[-1]]):
            capture = bisect_right(self._counts, number)
            if event.taken:
                kind = TEMPORARY if capture else GIVEN
                segments.append(
                    RecordedAllocation(event.address, event.num_bytes, capture, kind=kind)
                )
                continue
            place = next(
                place
                for place, one in enumerate(segments)
                if one.address == event.address and one.given == NEVER
            )
            if capture < 2 or segments[place].taken == capture:
                # No graph was captured that could know it.
                del segments[place]
            else:
                segments[place] = replace(segments[place], given=capture - 1)
        return [
            *stage_allocations(memory),
            *(self._with_contents(memory, one) for one in segments),
        ]

    def _with_contents(self, memory: StageMemory, one: RecordedAllocation) -> RecordedAllocation:
        if one.given != NEVER or one.address not in self._permanent:
            return one
        assert self._kept is not None
        at = one.address - memory.graph_pool_bytes(1).data_ptr()
        contents = self._kept[at : at + one.num_bytes].numpy().tobytes()
        return replace(one, kind=PERMANENT, contents=contents)
