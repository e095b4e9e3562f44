"""A stage whose graphs are restored, without a device: what stands in for one writes rows where
graphs would. Sizes beyond ``PROMPTS`` are prompts', as everywhere.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from pilotlight.engine.cuda.fitting import GraphsRefused, places_of
from pilotlight.engine.cuda.graphs import SIZES, GraphStep, GraphSupplier, Kind
from pilotlight.engine.cuda.restored import RestoredGraphs
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.memory import StageMemory
from pilotlight.native.library import NativeError, Nowhere
from pilotlight.policy.graphs.restoring import PROMPTS, prompt_size
from pilotlight.policy.materialized import GraphLayout, GraphPlace, Trial
from pilotlight.policy.model import Stage

WHOLE = Stage(0, 4)
POOL_BYTES, VOCAB, DEADLINE_S = 1 << 20, 32, 10.0


def places_in(addresses: dict[str, int]) -> tuple[GraphPlace, ...]:
    """As a layout has them."""
    return tuple(GraphPlace(name=name, address=addresses[name]) for name in sorted(addresses))


class StandInPool:
    """Of the host's memory."""

    def __init__(self) -> None:
        self.mapped_bytes = POOL_BYTES
        self.closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.closed = True


class StandInSteps:
    """Steps that give what they are filled with, and the stage that has them."""

    def __init__(self, layers: Stage = WHOLE) -> None:
        self.layers = layers
        self.others: dict[Stage, StandInSteps] = {}
        """Of other ranges."""
        self.pool = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self.out = self.pool[: 4 * SIZES[-1] * VOCAB].view(torch.float32).view(SIZES[-1], VOCAB)
        self.input = 5.0
        self.has_trials = self.present = True
        self.places = {"metadata": 4096}
        self.through: Callable[[int], Tensor] | None = None
        """How a trial runs."""

    def steps_of(self, layers: Stage | None = None) -> "StandInSteps":
        return self.others.get(layers or WHOLE, self)

    @contextlib.contextmanager
    def trial_inputs(self, size: int) -> Iterator[None]:
        before, self.input = self.input, 7.0
        try:
            yield
        finally:
            self.input = before

    def trial(self, size: int) -> Tensor:
        assert self.through is not None
        with self.trial_inputs(size):
            return self.through(size)

    def kind_of(self, size: int) -> Kind:
        prompt = size > PROMPTS
        return Kind(self.layers, size - PROMPTS if prompt else size, prompt)

    def logits(self) -> Tensor:
        return self.out

    def output(self, size: int) -> Tensor:
        return self.out[: 1 if size > PROMPTS else size]

    def compute(self, size: int) -> None:
        out = self.output(size)
        out.copy_(torch.arange(out.numel()).view_as(out) * self.input + size)


class StandInDevice:
    """Makes a graph when it may, and says in which order."""

    def __init__(self, steps: StandInSteps, sizes: tuple[int, ...]) -> None:
        self.steps, self.tags = steps, sizes
        self.built: list[int] = []
        self.may: dict[int, threading.Event] = {rows: threading.Event() for rows in sizes}
        self.began: dict[int, threading.Event] = {rows: threading.Event() for rows in sizes}
        self.fails: dict[int, NativeError] = {}
        self.closed = False
        self.launched: list[int] = []
        self.when: dict[int, list[int]] = {}
        """What had been launched when each was made."""
        self.loaded: list[int] = []
        """Of which kernels were loaded before they were made."""
        self.nowhere: dict[int, str] = {}
        """Graphs with an address where nothing is."""
        self.checked: list[int] = []
        self.unlisted: set[int] = set()
        """Those that no launch takes."""
        self.listed: list[int] = []
        """Launched kernel by kernel."""
        self.spent_ms: dict[str, float] = {"images": 0.0, "nodes": 0.0}

    def load(self, size: int) -> None:
        self.loaded.append(size)
        self.spent_ms["images"] += 1.0

    def check(self, size: int) -> int:
        self.checked.append(size)
        if size in self.nowhere:
            raise Nowhere(-6, self.nowhere[size])
        return 0

    def go(self, *sizes: int) -> None:
        for rows in sizes or self.tags:
            self.may[rows].set()

    def build(self, rows: int, between: Callable[[], None]) -> None:
        self.began[rows].set()
        assert self.may[rows].wait(DEADLINE_S)
        between()
        if rows in self.fails:
            raise self.fails[rows]
        self.built.append(rows)
        self.when[rows] = list(self.launched)
        self.spent_ms = {**self.spent_ms, "nodes": self.spent_ms["nodes"] + 2.0}

    def launch(self, rows: int) -> None:
        assert rows in self.built
        self.launched.append(rows)
        self.steps.compute(rows)

    def check_list(self, rows: int) -> None:
        assert rows in self.loaded
        if rows in self.unlisted:
            raise NativeError(-1, "a memset of elements of 3 bytes")

    def launch_list(self, rows: int) -> None:
        self.listed.append(rows)
        if rows in self.fails:
            raise self.fails[rows]
        self.steps.compute(rows)

    def close(self) -> None:
        self.closed = True


class StandInCapture:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Kind] = []
        self.closed = False

    def supply(self, kind: Kind, step: object, output: object) -> GraphStep | None:
        self.asked.append(kind)
        return None

    def expect(self, tokens: int) -> bool:
        return False

    def extended(self) -> None: ...

    def arriving(self, requests: int) -> None: ...

    def sampled(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class RestoredRig:
    """A plan, its stage's steps, and the device."""

    def __init__(
        self,
        sizes: tuple[int, ...] = (1, 2, 4),
        *,
        prompts: tuple[int, ...] = (),
        wait_s: float = DEADLINE_S,
        rest_s: float = 0.0,
        later: bool = False,
        launch_lists: bool = False,
        steps: StandInSteps | None = None,
        layers: Stage | None = None,
    ) -> None:
        self.steps, self.pool = steps or StandInSteps(), StandInPool()
        self.capture, self.layers = StandInCapture(), layers
        self.behind: RestoredGraphs | None = None
        """Of what the stage may become."""
        lengths = tuple(map(prompt_size, prompts))
        self.device = StandInDevice(self.steps, (*sizes, *lengths))
        self.read: Callable[[], bytes] = lambda: b"archive"
        self.open: Callable[[], Any] = lambda: self.device
        self.slot = 3
        self.wait_s, self.rest_s, self.later = wait_s, rest_s, later
        self.launch_lists = launch_lists
        self.layout = GraphLayout(
            slot=3,
            places=places_in(places_of(self.steps)),
            pool_bytes=POOL_BYTES,
            trials=tuple(Trial(rows=rows, digest=self.recorded(rows)) for rows in sizes),
            prompts=tuple(
                Trial(rows=rows, digest=self.recorded(size))
                for rows, size in zip(prompts, lengths, strict=True)
            ),
        )
        self.plan: RestoredGraphs | None = None
        self.uses: dict[int, int] = {}
        """Of the model, when it was here before."""
        self.graph_set = SimpleNamespace(uses={})
        self.told_before: Any = None

    def recorded(self, size: int) -> str:
        with self.steps.trial_inputs(size):
            self.steps.compute(size)
        return digest_of(self.steps.output(size))

    def plan_alone(self) -> RestoredGraphs:
        """Its plan, of a stage that it is not told of."""
        self.plan = RestoredGraphs(
            self.layout,
            lambda: self.read(),
            open_archive=lambda memory, archive: self.open(),
            capture=lambda device, scratch: cast("GraphSupplier", self.capture),
            wait_s=self.wait_s,
            rest_s=self.rest_s,
            layers=self.layers,
            behind=self.behind,
            later=self.later,
            launch_lists=self.launch_lists,
            uses=self.uses,
        )
        return self.plan

    def begin(self, before: Callable[[], Any] = lambda: None) -> RestoredGraphs:
        """``before``: asked between the stage's memory and its steps."""
        plan = self.plan_alone()
        memory = SimpleNamespace(
            slot_number=self.slot,
            arena=SimpleNamespace(device=torch.device("cpu"), pool_bytes=4 * POOL_BYTES),
            graph_pool_bytes=lambda num_bytes: self.steps.pool[:num_bytes],
        )
        scratch = cast("Scratch", SimpleNamespace(graphs=self.pool))
        plan.supplier(cast("StageMemory", memory), scratch)
        self.told_before = before()
        plan.begin(self.steps, cast("Any", self.graph_set))
        return plan

    def supply(self, rows: int, layers: Stage = WHOLE, *, prompt: bool = False) -> GraphStep | None:
        """As a step of so many rows asks."""
        assert self.plan is not None
        kind = Kind(layers, rows, prompt)
        return self.plan.supply(kind, lambda: self.steps.out, lambda: self.steps.output(kind.size))

    def end(self) -> None:
        self.device.go()
        if self.plan is not None:
            self.plan.close()


def settled(rig: RestoredRig) -> None:
    """The thread has nothing to do any more."""
    assert rig.plan is not None
    assert rig.plan._thread is not None
    rig.plan._thread.join(DEADLINE_S)
    assert not rig.plan._thread.is_alive()


def unreadable(rig: RestoredRig) -> None:
    """Its archive is not what the artifact says."""

    def read() -> bytes:
        raise GraphsRefused("graphs_digest", "flipped")

    rig.read = read


def plan_of(rig: RestoredRig) -> Any:
    """That of which it has begun."""
    assert rig.plan is not None
    return rig.plan
