"""What keeps a stage's graphs from being recorded, without a device: by name."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from restored_rig import POOL_BYTES, WHOLE, StandInPool, StandInSteps

from pilotlight.engine.cuda.graphs import Kind
from pilotlight.engine.cuda.recording import GraphRecorder, NotRecorded
from pilotlight.native.graphs import GraphDump
from pilotlight.native.library import NativeError, Nowhere
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.materialized import Trial
from pilotlight.policy.model import Stage

SIZES, LENGTHS = (1, 2, 4), (16, 64)
PROMPT_SIZES = tuple(map(prompt_size, LENGTHS))
DUMP = GraphDump(b"archive", 3, 2, 1, 100, 9, 0)


class Recording:
    """A stage whose steps run as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = StandInSteps()
        self.steps.through = self.run
        self.graphs: dict[object, object] = {}
        self.turns: dict[Kind, int] = {}
        self.captures = True
        self.drift = 0.0
        """A graph's logits differ from the eager ones by as much."""
        self.reads_pool = False
        self.only: tuple[int, ...] = (*SIZES, *PROMPT_SIZES)
        """What is wrong is so with these sizes."""
        self.dumps: list[tuple[int, ...]] = []
        """What was written down, each time."""
        self.dump: GraphDump | NativeError = DUMP
        self.recorder = GraphRecorder(SIZES, LENGTHS)
        self.order: list[int] = []
        monkeypatch.setattr("pilotlight.engine.cuda.recording.CaptureOnSecondUse", self.capture)
        monkeypatch.setattr(GraphRecorder, "_handles", lambda recorder, steps, sizes: sizes)
        monkeypatch.setattr("pilotlight.engine.cuda.recording.dump_proved", self.dumped)
        monkeypatch.setattr("pilotlight.engine.cuda.recording.ArchiveOnDevice", self.opened)
        self.nowhere = ""
        """A graph has an address where nothing is."""

    def capture(self, device: object, scratch: object, *, keep: bool) -> object:
        assert keep
        return SimpleNamespace()

    def dumped(self, handles: tuple[int, ...], arena: object, ordinal: int) -> GraphDump:
        self.dumps.append(handles)
        if isinstance(self.dump, NativeError) and {*self.only} & {*handles}:
            raise self.dump
        if isinstance(self.dump, NativeError):
            return DUMP
        return self.dump

    def opened(self, memory: object, archive: bytes) -> object:
        def check(size: int) -> int:
            if self.nowhere:
                raise Nowhere(-6, self.nowhere)
            return 0

        return SimpleNamespace(check=check, close=lambda: None)

    def run(self, rows: int, of: StandInSteps | None = None) -> torch.Tensor:
        steps = of or self.steps
        kind = steps.kind_of(rows)
        turn = self.turns[kind] = self.turns.get(kind, 0) + 1
        if turn == 1:
            self.order.append(rows)
        was = float(self.steps.pool[-1])
        steps.compute(rows)
        out = steps.output(rows)
        wrong = rows in self.only
        if turn >= 2 and (self.captures or not wrong):
            self.graphs[kind] = object()
            out += self.drift if wrong else 0.0
        if self.reads_pool and wrong:
            out += was
        return out

    def has(self, layers: Stage) -> StandInSteps:
        """A range, in the same memory."""
        steps = StandInSteps(layers)
        steps.pool, steps.out = self.steps.pool, self.steps.out
        steps.through = lambda rows: self.run(rows, steps)
        self.steps.others[layers] = steps
        return steps

    def record(self) -> Any:
        memory = SimpleNamespace(
            slot_number=3,
            arena=SimpleNamespace(
                device=torch.device("cpu"), native_arena=None, native=SimpleNamespace(ordinal=0)
            ),
            graph_pool_bytes=lambda num_bytes: self.steps.pool[:num_bytes],
        )
        scratch = SimpleNamespace(graphs=StandInPool())
        self.recorder.supplier(cast("Any", memory), cast("Any", scratch))
        self.recorder.begin(self.steps, cast("Any", SimpleNamespace(graphs=self.graphs)))
        return self.recorder.record()


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return Recording(monkeypatch)


def test_what_is_recorded_says_where_everything_lies(recording: Recording) -> None:
    made = recording.record()
    assert made.archive == b"archive"
    assert recording.order == [*reversed(PROMPT_SIZES), 4, 2, 1], "the largest first"
    assert recording.dumps == [(*SIZES, *reversed(PROMPT_SIZES))]
    assert [trial.rows for trial in made.layout.prompts] == [16, 64]
    assert made.layout.prompts_refused == ""
    assert made.layout.digests.keys() == {*SIZES, *PROMPT_SIZES}
    assert len({*made.layout.digests.values()}) == len(made.layout.digests)
    assert made.layout.slot == 3
    assert made.layout.pool_bytes == POOL_BYTES
    assert made.layout.addresses.keys() == {"metadata", "logits"}
    assert [trial.rows for trial in made.layout.trials] == [1, 2, 4]
    assert len({trial.digest for trial in made.layout.trials}) == 3
    assert all(isinstance(trial, Trial) for trial in made.layout.trials)


WAYS: dict[str, dict[str, Any]] = {
    "varies": {"drift": 1.0},
    "permanent": {"reads_pool": True},
    "memory": {"captures": False},
    "used": {"graphs": {Kind(WHOLE, 8): object()}},
    "nodes": {"dump": NativeError(-1, "a graph has a node of type host")},
    "addresses": {"dump": GraphDump(b"", 3, 2, 1, 100, 9, 1)},
    "addresses: nowhere": {"nowhere": "nothing is known at 0x5"},
    "size": {"dump": GraphDump(bytes((128 << 20) + 1), 3, 2, 1, 100, 9, 0)},
}


@pytest.mark.parametrize("field", WAYS)
def test_what_another_process_cannot_have_is_refused_by_name(
    recording: Recording, field: str
) -> None:
    for name, value in WAYS[field].items():
        setattr(recording, name, value)
    with pytest.raises(NotRecorded) as refused:
        recording.record()
    assert refused.value.field == field.partition(":")[0]
    assert str(refused.value)


@pytest.mark.parametrize("field", ["varies", "permanent", "memory", "nodes"])
@pytest.mark.parametrize("wrong", [PROMPT_SIZES, PROMPT_SIZES[:1]])
def test_prompts_that_cannot_be_recorded_are_left_out_by_name(
    recording: Recording, field: str, wrong: tuple[int, ...]
) -> None:
    for name, value in WAYS[field].items():
        setattr(recording, name, value)
    recording.only = wrong
    layout = recording.record().layout
    assert layout.prompts_refused == field
    assert [trial.rows for trial in layout.trials] == [1, 2, 4]
    # A graph that cannot be written down is not told apart.
    others = [] if field == "nodes" or len(wrong) > 1 else [64]
    assert [trial.rows for trial in layout.prompts] == others
    assert {*recording.dumps[-1]} == {*layout.digests}


def test_a_model_without_trials_is_refused_by_name(recording: Recording) -> None:
    recording.steps.has_trials = False
    with pytest.raises(NotRecorded) as refused:
        recording.record()
    assert refused.value.field == "steps"


def test_nothing_is_recorded_where_a_range_is_alone(recording: Recording) -> None:
    """What leads to other layers would be nowhere in no stage that has them."""
    recording.steps.present = False
    with pytest.raises(NotRecorded) as refused:
        recording.record()
    assert refused.value.field == "stage"


def test_a_range_is_recorded_behind_the_whole_model(recording: Recording) -> None:
    half = recording.has(Stage(0, 2))
    whole, ran = recording.record(), len(recording.order)
    made = recording.recorder.record(half.layers)
    assert recording.order[ran:] == [*reversed(PROMPT_SIZES), 4, 2, 1], "each of its sizes"
    assert {kind.layers for kind in recording.graphs if isinstance(kind, Kind)} == {
        WHOLE,
        half.layers,
    }
    assert made.layout.digests.keys() == {*SIZES, *PROMPT_SIZES}
    assert made.layout.addresses == whole.layout.addresses
    assert made.layout.pool_bytes == whole.layout.pool_bytes
    with pytest.raises(NotRecorded) as refused:
        recording.recorder.record(half.layers)
    assert refused.value.field == "used"


@pytest.mark.parametrize("field", ["varies", "permanent", "memory"])
def test_what_is_wrong_with_prompts_of_the_whole_model_is_not_said_of_a_range(
    recording: Recording, field: str
) -> None:
    half = recording.has(Stage(0, 2))
    recording.only = PROMPT_SIZES
    for name, value in WAYS[field].items():
        setattr(recording, name, value)
    assert recording.record().layout.prompts_refused == field
    recording.only = ()
    assert recording.recorder.record(half.layers).layout.prompts_refused == ""
