"""Graphs that another process captured, made again in this one (design 8: lazy restore).

One thread makes them, one after the other, in the order of ``policy.graphs.restoring``. Before a
graph's first use its trial must give what was recorded. On the first one's way is what it needs
alone: its kernels are loaded while the stage gets its memory, its own addresses are looked at.

::

    supplier ──> read the archive, load kernels ─┬─> make graph after graph ──> all ready
    begin ─────> look at places ─────────────────┘          │
                   │          │                             └─ the driver refuses, or a trial differs: ``RestoreFailed``, the process ends
                   └─ misfit ─┴─> refused by name: graphs are captured as they are used
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from pilotlight.common.clock import SystemClock
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.fitting import Fit, Fitting, GraphsRefused, RestoreNews, fitted, opened
from pilotlight.engine.cuda.graph_device import ArchiveOnDevice, GraphDevice, RestoredGraph, built
from pilotlight.engine.cuda.graphs import (
    GraphSet,
    GraphStep,
    GraphSupplier,
    HasSteps,
    Kind,
    StageSteps,
)
from pilotlight.engine.cuda.launch_lists import LaunchLists
from pilotlight.engine.cuda.pace import Pace
from pilotlight.engine.cuda.prompts import length_for
from pilotlight.engine.cuda.proofs import Proofs
from pilotlight.engine.cuda.restore_times import RestoreTimes
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.library import NativeError, Nowhere, OutOfMemory
from pilotlight.policy.graphs.restoring import (
    Restoring,
    Run,
    ask,
    began,
    ended,
    expect,
    next_graph,
    prompt_size,
    rests,
)
from pilotlight.policy.materialized import GraphLayout
from pilotlight.policy.model import Stage

log = structlog.get_logger()

_NOW_S = SystemClock().monotonic_s
WAIT_S = 2.0
"""A step waits no longer for its graph: then it runs eagerly, and the next one asks again."""
REST_S = 1.0
"""So long others wait at most until what a request needs has run: weights may come from afar."""
CLOSE_S = 10.0
"""For the graph that is being made when the stage goes."""
POISON = 0xFF
"""No number in any dtype, and no address."""


class RestoredGraphs:
    """A ``GraphPlan``, and the stage's ``GraphSupplier``, of one range; all others are captured."""

    def __init__(
        self,
        recorded: GraphLayout,
        read: Callable[[], bytes],
        *,
        open_archive: Callable[[StageMemory, bytes], GraphDevice] = ArchiveOnDevice,
        fit: Fit = fitted,
        capture: Callable[[torch.device, Scratch], GraphSupplier] = CaptureOnSecondUse,
        wait_s: float = WAIT_S,
        rest_s: float = REST_S,
        layers: Stage | None = None,
        behind: "RestoredGraphs | None" = None,
        later: bool = False,
        launch_lists: bool = False,
        uses: Mapping[int, int] | None = None,
        monotonic_s: Callable[[], float] = _NOW_S,
    ) -> None:
        """Does nothing yet.

        Args:
            recorded: where the graphs expect everything.
            read: gives the archive, or raises ``GraphsRefused``; called by the thread.
            open_archive: reads an archive on the device that a stage's memory is on.
            fit: takes what its graphs need, or refuses them.
            capture: makes what gives the other graphs, and all where nothing is restored.
            wait_s: see ``WAIT_S``.
            rest_s: see ``REST_S``.
            layers: of the graphs; None: the whole model.
            behind: in the place of ``capture``: graphs of what the stage may become, in the same
                memory of the graph pool.
            later: nothing is loaded or made until the stage has memory for the range.
            launch_lists: a step whose kernels are loaded waits for no graph.
            uses: how often steps of each size ran before: those come first.
            monotonic_s: a clock, in seconds.
        """
        self._layout, self._recorded = recorded, recorded.digests
        self._read, self._open, self._fit = read, open_archive, fit
        self._capture, self._layers, self._behind = capture, layers, behind
        self._wait_s, self._rest_s = wait_s, rest_s
        self._changed = threading.Condition()
        self._order = Restoring(sizes=tuple(sorted(self._recorded)), uses=dict(uses or {}))
        self._later, self._running, self._closing = later, False, False
        self.took = RestoreTimes(monotonic_s)
        self._pace = Pace(monotonic_s, None if behind is None else behind._pace)
        self.sampled = self._pace.sampled
        self._graphs: GraphSet | None = None
        self._refused: GraphsRefused | None = None
        self._broken: NativeError | None = None
        self._proofs = Proofs(self._recorded)
        self.lists = LaunchLists(self._recorded, on=launch_lists)
        self._device: GraphDevice | None = None
        self._thread: threading.Thread | None = None
        self.memory: StageMemory | None = None
        self._scratch: Scratch | None = None
        self._steps: StageSteps | None = None
        self._fallback: GraphSupplier | None = None
        self._rest: Tensor | None = None  # of the graph pool: torch gives it to nothing else

    @property
    def news(self) -> RestoreNews:
        """How far it is. For any thread."""
        with self._changed:
            ready, proved = len(self._order.ready), len(self._proofs.proved)
            own = RestoreNews.of(ready, proved, self._broken or self._refused)
        return own if self._behind is None else own.with_those(self._behind.news)

    @property
    def uses(self) -> dict[int, int]:
        """How often steps of each recorded size ran, of this range or of what is behind it."""
        ran = Counter({} if self._behind is None else self._behind.uses)
        if self._graphs is not None and self._steps is not None:
            for size in self._recorded:
                ran[size] += self._graphs.uses.get(self._steps.kind_of(size), 0)
        return {size: uses for size, uses in ran.items() if uses}

    def supplier(self, memory: StageMemory, scratch: Scratch) -> "RestoredGraphs":
        """See ``GraphPlan``: the archive is read from now on."""
        self.memory, self._scratch = memory, scratch
        self._thread = threading.Thread(target=self._restore, name="graphs", daemon=True)
        self._thread.start()
        if self._behind is not None:
            self._fallback = self._behind.supplier(memory, scratch)
        else:
            self._fallback = self._capture(memory.arena.device, scratch)
        return self

    def begin(self, stage: HasSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``: from now on graphs are made, or from when the stage has the range."""
        if self._behind is not None:
            self._behind.begin(stage, graphs)
        self.took.begin()
        self._steps, self._graphs = stage.steps_of(self._layers), graphs
        assert self.memory is not None
        assert self._scratch is not None
        try:
            wanted = (self._layout, self.memory, self._scratch, self._steps, self._later)
            self._rest = self._fit(Fitting(*wanted))
        except GraphsRefused as refused:
            self._refuse(refused, of_stage=True)
            return
        self.took.until("reserved")
        self._go()

    def extended(self) -> None:
        """See ``GraphSupplier``: graphs need no weights."""
        if self._later:
            self.took.begin()
            self._go()
        if self._behind is not None:
            self._behind.extended()

    def _go(self) -> None:
        """Graphs are made from now on, if the stage has the range."""
        assert self._steps is not None
        with self._changed:
            if self._steps.present and self._refused is None and self._broken is None:
                self._running, self._later = True, False
        self._tell()

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """See ``GraphSupplier``.

        Raises:
            RestoreFailed: the driver refused a graph, or this one does not give what was recorded.
        """
        assert self._fallback is not None
        size, steps = kind.size, self._steps
        wanted = size in self._recorded and steps is not None and kind == steps.kind_of(size)
        run = self._settle(size) if wanted else Run.EAGER
        if run is Run.EAGER:
            return self._fallback.supply(kind, step, output)
        if run is Run.WAIT:
            return None
        device = self._device
        assert device is not None
        assert steps is not None
        if run is Run.LAUNCH_LIST:
            return GraphStep(self.lists.prove(device, steps, size), output(), once=True)
        self._prove(device, steps, size)
        return GraphStep(RestoredGraph(device, size, self._pace.launched), output())

    def expect(self, tokens: int) -> bool:
        """See ``GraphSupplier``: its prompt comes next, then a decode step of one row."""
        sizes = (1,) if (rows := length_for(tokens)) is None else (prompt_size(rows), 1)
        with self._changed:
            for size in sizes:
                self._order = expect(self._order, size)
            comes = self._running or sizes[0] in self._order.ready
        comes = comes and len(sizes) > 1 and sizes[0] in self._recorded
        return (self._behind is not None and self._behind.expect(tokens)) or comes

    def arriving(self, requests: int) -> None:
        """See ``GraphSupplier``: trials of what a request alone will need."""
        device, steps = self._device, self._steps
        if requests != 1 or device is None or steps is None or self._broken is not None:
            return
        if steps.present:
            self._try(device, steps, self._order.expected)

    def prove(self) -> None:
        """Proves every graph, before anything runs, with the pool full of nonsense. Every part of
        the stage is in place.

        Raises:
            RestoreFailed: one does not give what was recorded, or the driver refused one.
        """
        if self._steps is None or self.memory is None or self._refused is not None:
            return
        self.lists.stop()
        for size in self._recorded:
            # Graphs that may lie elsewhere take their memory as they are made.
            held = self._scratch.graphs.mapped_bytes if self._scratch is not None else 0
            self.memory.graph_pool_bytes(min(held, self._layout.pool_bytes)).fill_(POISON)
            self._steps.trial(size)

    def close(self) -> None:
        """See ``GraphSupplier``."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._pace.hurry()
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

    def _settle(self, size: int) -> Run:
        """How a step of a size runs, after waiting for its graph if that is on its way."""
        with self._changed:
            try:
                run, self._order = ask(self._order, size, self._can_list(size))
                if run is not Run.REPLAY and self._running:
                    self._changed.notify_all()  # It comes next.
                    self._pace.hurry()
                if run is Run.WAIT and self._running:
                    self._changed.wait_for(lambda: self._is_settled(size), self._wait_s)
                    run, self._order = ask(self._order, size, self._can_list(size))
            except Nowhere as error:
                self._refuse(GraphsRefused("addresses", str(error)))
                return Run.EAGER
            if self._broken is not None:
                raise RestoreFailed(f"the device refuses restored graphs: {self._broken}")
            return Run.EAGER if run is Run.WAIT and not self._running else run

    def _can_list(self, size: int) -> bool:
        return self._running and self.lists.can(self._device, size)

    def _is_settled(self, size: int) -> bool:
        settled = size in self._order.ready | self._order.refused
        return settled or not self._running or self._can_list(size)

    def _prove(self, device: GraphDevice, steps: StageSteps, size: int) -> None:
        if steps.kind_of(size).prompt:
            self._try(device, steps, (size, 1))  # The second token waits for no trial.
        self._proofs.require(steps, size, device.launch)
        self._tell()

    def _try(self, device: GraphDevice, steps: StageSteps, sizes: Iterable[int]) -> None:
        there = [size for size in sizes if size in self._order.ready]
        self._proofs.ahead(steps, there, device.launch)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _refuse(self, refused: GraphsRefused, *, of_stage: bool = False) -> None:
        """What is wrong with the stage is told, whatever the archive is."""
        facts = {"field": refused.field, "why": str(refused)}
        log.warning("graphs refused", action="graphs_refused", **facts)
        with self._changed:
            self._refused = refused if of_stage else self._refused or refused
            self._running = False
            self._changed.notify_all()

    def _restore(self) -> None:
        """The thread."""
        try:
            device = self._prepared()
            before, elsewhere = device.spent_ms, 0
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closing or self._refused)
                if not self._running or self._steps is None:
                    return
            self.took.until("begun")
            while (size := self._next()) is not None:
                elsewhere += device.check(size)
                # A step of what is made next need not wait until it is made.
                self.lists.load(device, size)
                self._tell()
                restored = built(device, size, self._beside)
                with self._changed:
                    self._order = ended(self._order, size, restored)
                self._tell()
                self.took.made("first", device.spent_ms, before)
            self.took.made("all", device.spent_ms, {})
            facts = {"elsewhere": elsewhere, "listed": len(self.lists.proved), **self.took.steps}
            log.info("graphs restored", action="graphs_restored", **facts)
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

    def _prepared(self) -> GraphDevice:
        """The archive, with kernels of as many graphs as there is time for, the first to come."""
        at_s = self.took.now_s()
        archive = self._read()
        at_s = self.took.part("read", at_s)
        assert self.memory is not None
        self._device = device = opened(self._open, self.memory, archive, self._recorded)
        at_s = self.took.part("open", at_s)
        loaded: set[int] = set()
        while (size := self._next_to_load(loaded)) is not None:
            with suppress(OutOfMemory):
                # Then there may be some when it is made.
                device.load(size)
                self.lists.loaded(device, size)
            loaded.add(size)
        self.took.part("load", at_s)
        return device

    def _next_to_load(self, loaded: Set[int]) -> int | None:
        """The graph whose kernels are loaded next, while there are no steps yet."""
        with self._changed:
            if self._running or self._closing or self._refused or self._later:
                return None
            return next_graph(replace(self._order, ready=frozenset(loaded)))

    def _next(self) -> int | None:
        with self._changed:
            if not self._changed.wait_for(self._goes_on, self._rest_s):
                self._rest_s = 0.0
        self._pace.wait()
        with self._changed:
            size = None if self._closing else next_graph(self._order)
            if size is None:
                self._running = False
            else:
                self._order = began(self._order, size)
            return size

    def _beside(self) -> None:
        """Between two pieces of a graph: steps run first, unless one waits for a graph."""
        if not (self._closing or self._order.asked):
            self._pace.wait()

    def _goes_on(self) -> bool:
        return self._closing or not rests(self._order, self._proofs.proved | self.lists.proved)
