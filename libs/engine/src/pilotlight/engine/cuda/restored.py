"""Graphs that another process captured, made again in this one (design 8: lazy restore).

One thread makes them, one after the other, in the order of ``policy.graphs.restoring``: a size that
a step waits for goes first, then what a request that has come will need. Before a graph's first use
its trial must give what was recorded. On the way of the first one is what that one needs alone: its
kernels are loaded while the stage gets its memory, and its own addresses are looked at.

::

    supplier ──> read the archive, load kernels ─┬─> make graph after graph ──> all ready
    begin ─────> look at places ─────────────────┘          │
                   │          │                             └─ the driver refuses, or a trial differs: ``RestoreFailed``, the process ends
                   └─ misfit ─┴─> refused by name: graphs are captured as they are used
"""

import threading
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
from pilotlight.engine.cuda.graphs import GraphSet, GraphStep, GraphSupplier, Kind, StageSteps
from pilotlight.engine.cuda.launch_lists import LaunchLists
from pilotlight.engine.cuda.pace import Pace
from pilotlight.engine.cuda.prompts import length_for
from pilotlight.engine.cuda.proofs import Proofs
from pilotlight.engine.cuda.took import Took
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
    """A ``GraphPlan``, and the stage's ``GraphSupplier``: of the whole model's decode steps, and of
    those of one prompt alone. All others are captured.
    """

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
            wait_s: the most that a step waits for its graph.
            rest_s: see ``REST_S``.
            later: the stage may become the whole model: until it has memory for that, no kernel is
                loaded, and no graph is made.
            launch_lists: a step whose kernels are loaded does not wait for its graph.
            uses: how often steps of each size ran before: those come first.
            monotonic_s: a clock, in seconds.
        """
        self._layout, self._recorded = recorded, recorded.digests
        self._read, self._capture = read, capture
        self._open, self._fit = open_archive, fit
        self._wait_s, self._rest_s = wait_s, rest_s
        self._changed = threading.Condition()
        self._order = Restoring(sizes=tuple(sorted(self._recorded)), uses=dict(uses or {}))
        self._later, self._running, self._closing = later, False, False
        self._took, self._pace = Took(monotonic_s), Pace(monotonic_s)
        self._graphs: GraphSet | None = None
        self._refused: GraphsRefused | None = None
        self._broken: NativeError | None = None
        self._proofs = Proofs(self._recorded)
        self.lists = LaunchLists(self._recorded, on=launch_lists)
        self._device: GraphDevice | None = None
        self._thread: threading.Thread | None = None
        self._memory: StageMemory | None = None
        self._scratch: Scratch | None = None
        self._steps: StageSteps | None = None
        self._fallback: GraphSupplier | None = None
        self._rest: Tensor | None = None  # of the graph pool: torch gives it to nothing else

    @property
    def news(self) -> RestoreNews:
        """How far it is. For any thread."""
        with self._changed:
            refused, broken = self._refused, self._broken
            return RestoreNews(
                ready=len(self._order.ready),
                proved=len(self._proofs.proved),
                refused="driver" if broken else refused.field if refused else "",
                message=str(broken or refused or ""),
            )

    @property
    def took_ms(self) -> Mapping[str, float]:
        """Milliseconds: of reading and opening the archive and loading the first kernels, while the
        stage gets its steps; since then, until ``reserved``, ``begun``, ``first`` and ``all``; of
        the first graph and of all, by part.
        """
        return dict(self._took.ms)

    @property
    def uses(self) -> dict[int, int]:
        """How often steps of each recorded size ran."""
        if self._graphs is None or self._steps is None:
            return {}
        ran = {size: self._graphs.uses.get(self._steps.kind_of(size)) for size in self._recorded}
        return {size: uses for size, uses in ran.items() if uses}

    def supplier(self, memory: StageMemory, scratch: Scratch) -> "RestoredGraphs":
        """See ``GraphPlan``: the archive is read from now on."""
        self._memory, self._scratch = memory, scratch
        self._fallback = self._capture(memory.arena.device, scratch)
        self._thread = threading.Thread(target=self._restore, name="graphs", daemon=True)
        self._thread.start()
        return self

    def begin(self, steps: StageSteps, graphs: GraphSet) -> None:
        """See ``GraphPlan``: from now on graphs are made, or from when the stage is whole."""
        self._steps, self._graphs = steps, graphs
        self._took.begin()
        assert self._memory is not None
        assert self._scratch is not None
        try:
            stage = Fitting(self._layout, self._memory, self._scratch, steps, self._later)
            self._rest = self._fit(stage)
        except GraphsRefused as refused:
            self._refuse(refused, of_stage=True)
            return
        self._took.until("reserved")
        self._go()

    def extended(self) -> None:
        """See ``GraphSupplier``: graphs need no weights."""
        if self._later:
            self._took.begin()
            self._go()

    def _go(self) -> None:
        """Graphs are made from now on, if the stage is whole."""
        assert self._steps is not None
        with self._changed:
            if self._steps.whole and self._refused is None and self._broken is None:
                self._running, self._later = True, False
            self._changed.notify_all()

    def supply(
        self, kind: Kind, step: Callable[[], Tensor], output: Callable[[], Tensor]
    ) -> GraphStep | None:
        """See ``GraphSupplier``.

        Raises:
            RestoreFailed: the driver refused a graph, or this one does not give what was recorded.
        """
        assert self._fallback is not None
        size = kind.size
        wanted = (
            size in self._recorded and self._steps is not None and kind == self._steps.kind_of(size)
        )
        run = self._settle(size) if wanted else Run.EAGER
        if run is Run.EAGER:
            return self._fallback.supply(kind, step, output)
        if run is Run.WAIT:
            return None
        assert self._device is not None
        assert self._steps is not None
        if run is Run.LAUNCH_LIST:
            return GraphStep(self.lists.prove(self._device, self._steps, size), output(), once=True)
        self._prove(size)
        return GraphStep(RestoredGraph(self._device, size, self._pace.launched), output())

    def expect(self, tokens: int) -> bool:
        """See ``GraphSupplier``: its prompt comes next, then a decode step of one row."""
        sizes = (1,) if (rows := length_for(tokens)) is None else (prompt_size(rows), 1)
        with self._changed:
            for size in sizes:
                self._order = expect(self._order, size)
            comes = self._running or sizes[0] in self._order.ready
            return comes and len(sizes) > 1 and sizes[0] in self._recorded

    def arriving(self, requests: int) -> None:
        """See ``GraphSupplier``: trials of what a request alone will need."""
        if requests == 1 and self._steps is not None and self._steps.whole and not self._broken:
            self._try(self._order.expected)

    def prove(self) -> None:
        """Proves every graph, before anything runs, with the pool full of nonsense. Every part of
        the stage is in place.

        Raises:
            RestoreFailed: one does not give what was recorded, or the driver refused one.
        """
        if self._steps is None or self._memory is None or self._refused is not None:
            return
        self.lists.stop()
        for size in self._recorded:
            # Graphs that may lie elsewhere take their memory as they are made.
            held = self._scratch.graphs.mapped_bytes if self._scratch is not None else 0
            self._memory.graph_pool_bytes(min(held, self._layout.pool_bytes)).fill_(POISON)
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
        order = self._order
        settled = size in order.ready or size in order.refused
        return settled or not self._running or self._can_list(size)

    def _prove(self, size: int) -> None:
        assert self._device is not None
        assert self._steps is not None
        if self._steps.kind_of(size).prompt:
            self._try((size, 1))  # The second token waits for no trial.
        self._proofs.require(self._steps, size, self._device.launch)
        with self._changed:
            self._changed.notify_all()

    def _try(self, sizes: Iterable[int]) -> None:
        if self._device is not None and self._steps is not None:
            there = [size for size in sizes if size in self._order.ready]
            self._proofs.ahead(self._steps, there, self._device.launch)

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
            device = self._prepared()
            before, elsewhere = device.spent_ms, 0
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closing or self._refused)
                if not self._running or self._steps is None:
                    return
            self._took.until("begun")
            while (size := self._next()) is not None:
                elsewhere += device.check(size)
                self._list(device, size)
                self._ended(size, built(device, size))
                if "first" not in self._took.ms:
                    self._took.until("first")
                    self._took.spent("first", device, before)
            self._took.until("all")
            self._took.spent("all", device, {})
            facts = {"elsewhere": elsewhere, "listed": len(self.lists.proved), **self._took.ms}
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
        """The archive, with the kernels of as many graphs as there is time for, in the order in
        which graphs come.
        """
        at_s = self._took.now_s()
        archive = self._read()
        at_s = self._took.lasted("read", at_s)
        assert self._memory is not None
        self._device = device = opened(self._open, self._memory, archive, self._recorded)
        at_s = self._took.lasted("open", at_s)
        loaded: set[int] = set()
        while (size := self._next_to_load(loaded)) is not None:
            with suppress(OutOfMemory):
                # Then there may be some when it is made.
                device.load(size)
                self.lists.loaded(device, size)
            loaded.add(size)
        self._took.lasted("load", at_s)
        return device

    def _list(self, device: GraphDevice, size: int) -> None:
        """A step of what is made next need not wait until it is made."""
        self.lists.load(device, size)
        with self._changed:
            self._changed.notify_all()

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

    def _goes_on(self) -> bool:
        return self._closing or not rests(self._order, self._proofs.proved | self.lists.proved)

    def _ended(self, size: int, restored: bool) -> None:
        with self._changed:
            self._order = ended(self._order, size, restored)
            self._changed.notify_all()
