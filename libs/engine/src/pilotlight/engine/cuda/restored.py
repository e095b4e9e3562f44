"""Decode graphs that another process captured, made again in this one (design 8: lazy restore).

One thread makes them, one after the other, in the order of ``policy.graphs.restoring``: a size that
a step waits for goes first. Before a graph's first use its trial must give what was recorded.

::

    supplier ──> read the archive ─┬─> make graph after graph ──> all ready
    begin ─────> look at places ───┘          │
                   │          │               └─ the driver refuses, or a trial differs: ``RestoreFailed``, the process ends
                   └─ misfit ─┴─> refused by name: graphs are captured as they are used
"""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from pilotlight.common.clock import SystemClock
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice, GraphDevice, RestoredGraph
from pilotlight.engine.cuda.graphs import (
    SIZES,
    DecodeSteps,
    GraphSet,
    GraphStep,
    GraphSupplier,
    Kind,
)
from pilotlight.engine.cuda.trials import HOST_ROWS, digest_of
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.errors import RestoreFailed
from pilotlight.engine.faults import out_of_memory
from pilotlight.native.library import AddressTaken, NativeError, Nowhere, OutOfMemory
from pilotlight.policy.graphs.restoring import Restoring, Run, ask, began, ended, next_graph
from pilotlight.policy.materialized import GraphLayout

log = structlog.get_logger()

_NOW_S = SystemClock().monotonic_s
WAIT_S = 2.0
"""A step waits no longer for its graph: then it runs eagerly, and the next one asks again."""
CLOSE_S = 10.0
"""For the graph that is being made when the stage goes."""
DIGEST = re.compile(r"[0-9a-f]{64}")
"""Of a trial's logits."""
POISON = 0xFF
"""No number in any dtype, and no address."""
SEGMENT_BYTES, LEAST_BYTES = 2 << 20, 20 << 20
"""torch takes segments in multiples of the one; what is as long as the other has its own."""


class GraphsRefused(Exception):
    """Graphs are not restored; ``field`` says what is wrong with them. Nothing was asked of the
    driver.
    """

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


class RestoredGraphs:
    """A ``GraphPlan``, and the stage's ``GraphSupplier``: of the whole model's decode steps. All
    others are captured.
    """

    def __init__(
        self,
        recorded: GraphLayout,
        read: Callable[[], bytes],
        *,
        open_archive: Callable[[StageMemory, bytes], GraphDevice] = ArchiveOnDevice,
        capture: Callable[[torch.device, Scratch], GraphSupplier] = CaptureOnSecondUse,
        wait_s: float = WAIT_S,
        uses: Mapping[int, int] | None = None,
        monotonic_s: Callable[[], float] = _NOW_S,
    ) -> None:
        """Does nothing yet.

        Args:
            recorded: where the graphs expect everything.
            read: gives the archive, or raises ``GraphsRefused``; called by the thread.
            open_archive: reads an archive on the device that a stage's memory is on.
            capture: makes what gives the other graphs, and all where nothing is restored.
            wait_s: the most that a step waits for its graph.
            uses: how often steps of each size ran before: those come first.
            monotonic_s: a clock, in seconds.
        """
        self._recorded = {trial.rows: trial.digest for trial in recorded.trials}
        self._layout = recorded
        self._read = read
        self._open = open_archive
        self._capture = capture
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._order = Restoring(sizes=tuple(sorted(self._recorded)), uses=dict(uses or {}))
        self._running = self._closing = False
        self._now_s = monotonic_s
        self._begun_s = 0.0
        self._took_ms: dict[str, float] = {}
        self._graphs: GraphSet | None = None
        self._refused: GraphsRefused | None = None
        self._broken: NativeError | None = None
        self._proved = 0
        self._device: GraphDevice | None = None
        self._thread: threading.Thread | None = None
        self._memory: StageMemory | None = None
        self._scratch: Scratch | None = None
        self._steps: DecodeSteps | None = None
        self._fallback: GraphSupplier | None = None
        self._rest: Tensor | None = None
        """Of the graph pool, so that torch gives it to nothing else."""

    @property
    def news(self) -> RestoreNews:
        """How far it is. For any thread."""
        with self._changed:
            refused, broken = self._refused, self._broken
            return RestoreNews(
                ready=len(self._order.ready),
                proved=self._proved,
                refused="driver" if broken else refused.field if refused else "",
                message=str(broken or refused or ""),
            )

    @property
    def took_ms(self) -> Mapping[str, float]:
        """Milliseconds since the stage had its steps, until each of what there was to do."""
        return dict(self._took_ms)

    @property
    def uses(self) -> dict[int, int]:
        """How often steps of each recorded size ran."""
        if self._graphs is None or self._steps is None:
            return {}
        ran = {rows: self._graphs.uses.get(self._steps.kind_of(rows)) for rows in self._recorded}
        return {rows: uses for rows, uses in ran.items() if uses}

    def supplier(self, memory: StageMemory, scratch: Scratch) -> "RestoredGraphs":
        """See ``GraphPlan``: the archive is read from now on."""
        self._memory, self._scratch = memory, scratch
        self._fallback = self._capture(memory.arena.device, scratch)
        self._thread = threading.Thread(target=self._restore, name="graphs", daemon=True)
        self._thread.start()
        return self

    def begin(self, steps: DecodeSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``: from now on graphs are made."""
        self._steps, self._graphs, self._begun_s = steps, graphs, self._now_s()
        try:
            self._check(steps)
            self._reserve(steps)
        except GraphsRefused as refused:
            self._refuse(refused, of_stage=True)
            return
        self._took("reserved")
        with self._changed:
            self._running = self._refused is None
            self._changed.notify_all()

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """See ``GraphSupplier``.

        Raises:
            RestoreFailed: the driver refused a graph, or this one does not give what was recorded.
        """
        assert self._fallback is not None
        wanted = (
            kind.rows in self._recorded
            and self._steps is not None
            and kind == self._steps.kind_of(kind.rows)
        )
        run = self._settle(kind.rows) if wanted else Run.EAGER
        if run is Run.EAGER:
            return self._fallback.supply(kind, step, output)
        if run is not Run.REPLAY:
            return None
        self._prove(kind.rows)
        assert self._device is not None
        return GraphStep(RestoredGraph(self._device, kind.rows), output())

    def prove(self) -> None:
        """Proves every graph, before anything runs, with the pool full of nonsense. Every part of
        the stage is in place.

        Raises:
            RestoreFailed: one does not give what was recorded, or the driver refused one.
        """
        if self._steps is None or self._memory is None or self._refused is not None:
            return
        for rows in self._recorded:
            self._memory.graph_pool_bytes(self._layout.pool_bytes).fill_(POISON)
            self._steps.trial(rows)

    def close(self) -> None:
        """See ``GraphSupplier``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                # The driver does not answer: what it is at must not be taken away under it.
                log.error("graphs are not let go", action="graphs_stuck")
                return
        if self._device is not None:
            self._device.close()
            self._device = None
        self._rest = None
        if self._fallback is not None:
            self._fallback.close()

    def _check(self, steps: DecodeSteps) -> None:
        assert self._memory is not None
        if not steps.has_trials:
            raise GraphsRefused("steps", "the stage has no steps that graphs are restored for")
        rows = [trial.rows for trial in self._layout.trials]
        digests = all(DIGEST.fullmatch(trial.digest) for trial in self._layout.trials)
        if not rows or rows != sorted({*rows} & {*SIZES}) or not digests:
            raise GraphsRefused("trials", f"trials of {rows} rows are none that could be recorded")
        most_bytes = self._memory.arena.pool_bytes
        if not 0 < self._layout.pool_bytes <= most_bytes:
            raise GraphsRefused(
                "pool", f"a graph pool has 1 to {most_bytes} bytes, not {self._layout.pool_bytes}"
            )
        places = places_of(steps)
        slot = self._memory.slot_number
        field = self._layout.differs(slot, places)
        if field is not None:
            recorded = {**self._layout.addresses, "slot": self._layout.slot}
            here = {**places, "slot": slot}
            # A name that nobody knows would be whatever the manifest says.
            raise GraphsRefused(
                field if field in here else "places",
                f"{field} is {here.get(field)} here, and {recorded.get(field)} was recorded",
            )

    def _reserve(self, steps: DecodeSteps) -> None:
        """Has memory behind all of the graph pool that the graphs know."""
        assert self._memory is not None
        assert self._scratch is not None
        pool, logits = self._scratch.graphs, steps.logits(SIZES[-1])
        first = self._memory.graph_pool_bytes(1).data_ptr()
        held = (logits.data_ptr() + logits.nbytes - first) // SEGMENT_BYTES * SEGMENT_BYTES
        left = self._layout.pool_bytes - held
        try:
            if left > 0:
                with pool.use():
                    self._rest = torch.empty(
                        max(left, LEAST_BYTES), dtype=torch.uint8, device=logits.device
                    )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise GraphsRefused("pool", f"the device has no memory for graphs: {error}") from error
        if pool.mapped_bytes < self._layout.pool_bytes:
            raise GraphsRefused(
                "pool",
                f"the graph pool has {pool.mapped_bytes} bytes, and the graphs use {self._layout.pool_bytes}",
            )

    def _settle(self, rows: int) -> Run:
        """How a step of so many rows runs, after waiting for its graph if that is on its way."""
        with self._changed:
            run, self._order = ask(self._order, rows, kernels_loaded=False)
            if run is Run.WAIT and self._running:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_settled(rows), self._wait_s)
                run, self._order = ask(self._order, rows, kernels_loaded=False)
            if self._broken is not None:
                raise RestoreFailed(f"the device refuses restored graphs: {self._broken}")
            return Run.EAGER if run is Run.WAIT and not self._running else run

    def _is_settled(self, rows: int) -> bool:
        order = self._order
        return not self._running or rows in order.ready or rows in order.refused

    def _prove(self, rows: int) -> None:
        assert self._device is not None
        assert self._steps is not None
        with self._steps.trial_inputs(rows):
            self._device.launch(rows)
            found = digest_of(self._steps.logits(rows))
        recorded = self._recorded[rows]
        if found != recorded:
            raise RestoreFailed(
                f"the graph of {rows} rows gave {found[:16]} for its trial, and {recorded[:16]} was recorded"
            )
        with self._changed:
            self._proved += 1

    def _refuse(self, refused: GraphsRefused, *, of_stage: bool = False) -> None:
        """What is wrong with the stage is told, whatever the archive is."""
        log.warning(
            "graphs refused", action="graphs_refused", field=refused.field, why=str(refused)
        )
        with self._changed:
            self._refused = refused if of_stage else self._refused or refused
            self._running = False
            self._changed.notify_all()

    def _restore(self) -> None:
        """The thread."""
        try:
            self._device = device = self._opened(self._read())
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closing or self._refused)
                if not self._running or self._steps is None:
                    return
            device.check()
            self._took("opened")
            while (rows := self._next()) is not None:
                self._ended(rows, self._built(device, rows))
                if "first" not in self._took_ms:
                    self._took("first")
                    # What proves larger graphs is loaded now, not at its first use in a step.
                    digest_of(torch.zeros_like(self._steps.logits(HOST_ROWS + 1)))
            self._took("all")
            log.info("graphs restored", action="graphs_restored", **self._took_ms)
        except GraphsRefused as refused:
            self._refuse(refused)
        except Nowhere as error:
            self._refuse(GraphsRefused("addresses", str(error)))
        except NativeError as error:
            log.error("graphs broken", action="graphs_broken", error=str(error))
            with self._changed:
                self._broken, self._running = error, False
                self._changed.notify_all()
        except BaseException as error:
            self._refuse(GraphsRefused("thread", f"{type(error).__name__}: {error}"))
            raise

    def _took(self, step: str) -> None:
        self._took_ms[step] = round((self._now_s() - self._begun_s) * 1e3, 1)

    def _opened(self, archive: bytes) -> GraphDevice:
        assert self._memory is not None
        try:
            device = self._open(self._memory, archive)
        except AddressTaken as error:
            raise GraphsRefused("arena_address", str(error)) from error
        except NativeError as error:
            raise GraphsRefused("archive", str(error)) from error
        if sorted(device.tags) != sorted(self._recorded):
            device.close()
            raise GraphsRefused(
                "sizes", f"the archive has graphs of {device.tags} rows, not as recorded"
            )
        return device

    @staticmethod
    def _built(device: GraphDevice, rows: int) -> bool:
        """A graph is ready; False where there is no memory for it."""
        try:
            device.build(rows)
        except OutOfMemory as error:
            log.warning("no memory for a graph", action="graph_left_out", rows=rows, why=str(error))
            return False
        return True

    def _next(self) -> int | None:
        with self._changed:
            rows = None if self._closing else next_graph(self._order)
            if rows is None:
                self._running = False
            else:
                self._order = began(self._order, rows)
            return rows

    def _ended(self, rows: int, restored: bool) -> None:
        with self._changed:
            self._order = ended(self._order, rows, restored)
            self._changed.notify_all()


def places_of(steps: DecodeSteps) -> dict[str, int]:
    """Addresses of all that a stage's captured steps read and write, but for parameters, KV and
    what they write in passing.
    """
    return {**steps.places, "logits": steps.logits(SIZES[-1]).data_ptr()}
