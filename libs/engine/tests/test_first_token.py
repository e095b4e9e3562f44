"""What is done for a first token before the last part has come: trials behind the last copy, and a
rehearsal beside the copies. Without a device.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from restored_rig import DEADLINE_S, WHOLE, RestoredRig, plan_of, settled
from torch import Tensor

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.pace import IDLE_S, LAUNCHES, Pace
from pilotlight.engine.cuda.proofs import TrialUnderWay
from pilotlight.engine.cuda.rehearsal import GREEDY, Rehearsal
from pilotlight.engine.cuda.trials import HOST_ROWS
from pilotlight.engine.errors import RestoreFailed
from pilotlight.native.library import NativeError
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype, Stage


@pytest.fixture
def rig() -> Iterator[RestoredRig]:
    """A request of 40 tokens has come, and all graphs are ready."""
    made = RestoredRig((1, 2), prompts=(16, 64))
    made.begin(before=lambda: plan_of(made).expect(40))
    made.device.go()
    settled(made)
    yield made
    made.end()


def test_trials_of_what_a_request_needs_run_behind_the_last_copy(rig: RestoredRig) -> None:
    plan = plan_of(rig)
    plan.arriving(1)
    assert rig.device.launched == [prompt_size(64), 1], "in the order of its steps"
    assert rig.steps.input == 5.0, "the steps' own inputs are back"
    assert plan.news.proved == 0, "nobody has looked at what they gave"
    rig.steps.out.zero_()
    assert rig.supply(64, prompt=True) is not None
    assert plan.news.proved == 1
    assert rig.supply(1) is not None
    assert rig.device.launched == [prompt_size(64), 1], "no trial runs twice"
    assert plan.news.proved == 2
    plan.arriving(1)
    assert rig.device.launched == [prompt_size(64), 1], "nor after its proof"


@pytest.mark.parametrize("size", [prompt_size(64), 1])
def test_a_trial_that_gave_other_bits_ends_the_process_before_a_step_runs(
    rig: RestoredRig, size: int
) -> None:
    wrong = {**rig.layout.digests, size: "0" * 64}
    plan = plan_of(rig)
    plan._proofs._recorded = wrong
    plan.arriving(1)
    rows = 64 if size > 1 else 1
    with pytest.raises(RestoreFailed, match="and 0000000000000000 was recorded"):
        rig.supply(rows, prompt=size > 1)
    assert plan.news.proved == 0


def test_prompts_of_several_requests_are_no_steps_of_a_graph(rig: RestoredRig) -> None:
    for requests in (0, 2):
        plan_of(rig).arriving(requests)
    assert rig.device.launched == []


def test_a_graph_that_is_not_ready_is_proved_when_it_is_used() -> None:
    rig = RestoredRig((1, 2), prompts=(64,))
    plan = rig.begin(before=lambda: plan_of(rig).expect(40))
    assert rig.device.began[prompt_size(64)].wait(DEADLINE_S)
    plan.arriving(1)
    assert rig.device.launched == []
    rig.device.go(prompt_size(64))
    assert rig.supply(64, prompt=True) is not None
    assert rig.device.launched == [prompt_size(64)], "the decode step's is not ready either"
    rig.end()


def test_a_request_that_comes_when_graphs_are_ready_has_its_trials_too() -> None:
    rig = RestoredRig((1, 2), prompts=(16,))
    plan = rig.begin()
    rig.device.go()
    settled(rig)
    assert plan.expect(16)
    plan.arriving(1)
    assert rig.device.launched == [prompt_size(16), 1]
    rig.end()


def test_a_trial_that_the_driver_refuses_ends_the_process(rig: RestoredRig) -> None:
    def refuse(size: int) -> None:
        raise NativeError(700, "illegal address")

    rig.device.launch = refuse
    with pytest.raises(RestoreFailed, match="illegal address"):
        plan_of(rig).arriving(1)


def test_refused_graphs_and_shorter_stages_have_no_trials(rig: RestoredRig) -> None:
    plan = plan_of(rig)
    rig.steps.present = False
    plan.arriving(1)
    rig.steps.present = True
    plan._broken = NativeError(700, "illegal address")
    plan.arriving(1)
    assert rig.device.launched == []
    plan._broken = None


def test_what_a_trial_gave_is_looked_at_later(rig: RestoredRig) -> None:
    """Its logits lie where those of every other step do."""
    under_way = TrialUnderWay(rig.steps, HOST_ROWS, rig.device.launch)
    rig.steps.out.fill_(3)
    under_way.require(rig.layout.digests[HOST_ROWS], "the graph")
    with pytest.raises(RestoreFailed, match="2 rows gave"):
        under_way.require("0" * 64, "the graph")


def test_graphs_of_many_rows_are_proved_when_they_are_used() -> None:
    """Their digest is computed on the device, which would be waited for."""
    rig = RestoredRig((1, 2, 4))
    plan = rig.begin()
    rig.device.go()
    settled(rig)
    plan._order = replace(plan._order, expected=(4,))
    plan.arriving(1)
    assert rig.device.launched == []
    assert rig.supply(4) is not None
    rig.end()


class Ticks:
    """A clock that stands."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Watched(threading.Condition):
    """Says who waits, and for how long at most; waits as long as it must."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        self.waits.set()
        return super().wait(DEADLINE_S)


def pace_at(clock: Ticks) -> tuple[Pace, Watched]:
    pace, watched = Pace(clock), Watched()
    pace._changed = watched
    return pace, watched


def test_graphs_are_made_at_once_while_no_steps_run() -> None:
    clock = Ticks()
    pace, watched = pace_at(clock)
    pace.wait()
    pace.launched()
    clock.now_s += 2 * IDLE_S
    pace.wait()
    assert watched.waited == []


@pytest.mark.parametrize(
    ("how", "times"), [("launched", LAUNCHES + 1), ("sampled", LAUNCHES), ("hurry", 1)]
)
def test_a_graph_is_made_behind_launches_from_now_on_or_when_one_is_waited_for(
    how: str, times: int
) -> None:
    pace, watched = pace_at(Ticks())
    for _ in range(2 + LAUNCHES):
        pace.launched()
        pace.sampled()
    check_waits_for(pace, watched, how, times)


def test_a_piece_waits_for_what_samples_behind_the_second_launch() -> None:
    pace, watched = pace_at(Ticks())
    step(pace)
    thread = waiting_thread(pace, watched)
    step(pace)
    watched.waits.clear()
    pace.launched()
    assert watched.waits.wait(DEADLINE_S), "what samples is not on the device yet"
    pace.sampled()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(("how", "times"), [("launched", LAUNCHES + 1), ("sampled", LAUNCHES)])
def test_the_step_of_the_first_token_does_not_count(how: str, times: int) -> None:
    pace, watched = pace_at(Ticks())
    pace.launched()
    thread = waiting_thread(pace, watched)
    watched.waits.clear()
    pace.sampled()
    assert watched.waits.wait(DEADLINE_S), "it looked, and waits on"
    check_goes_on(thread, pace, watched, how, times)


def test_graphs_of_what_a_stage_may_become_are_told_of_what_samples() -> None:
    clock = Ticks()
    behind, watched = pace_at(clock)
    pace = Pace(clock, behind)
    step(behind)
    thread = waiting_thread(behind, watched)
    for _ in range(LAUNCHES):
        pace.sampled()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_steps_that_end_while_a_graph_waits_for_others_let_it_go_on() -> None:
    clock = Ticks()
    pace, watched = pace_at(clock)
    pace.launched()
    clock.now_s += IDLE_S / 4
    thread = waiting_thread(pace, watched)
    with watched:
        clock.now_s += IDLE_S
        watched.notify_all()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert watched.waited == [pytest.approx(IDLE_S * 3 / 4)], "from the last launch on"


def step(pace: Pace) -> None:
    pace.launched()
    pace.sampled()


def waiting_thread(pace: Pace, watched: Watched) -> threading.Thread:
    thread = threading.Thread(target=pace.wait)
    thread.start()
    assert watched.waits.wait(DEADLINE_S)
    return thread


def check_waits_for(pace: Pace, watched: Watched, how: str, times: int) -> None:
    check_goes_on(waiting_thread(pace, watched), pace, watched, how, times)


def check_goes_on(
    thread: threading.Thread, pace: Pace, watched: Watched, how: str, times: int
) -> None:
    """A thread that waits goes on behind so many calls, and not before."""
    for left in reversed(range(times)):
        watched.waits.clear()
        getattr(pace, how)()
        if left:
            assert watched.waits.wait(DEADLINE_S), "it looked, and waits on"
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_who_is_in_a_hurry_before_the_thread_comes_is_not_forgotten() -> None:
    pace, _ = pace_at(Ticks())
    pace.launched()
    pace.hurry()
    pace.wait()


class CountedPace(Pace):
    """Keeps nobody waiting, and counts who came."""

    def __init__(self) -> None:
        super().__init__(Ticks())
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_pieces_of_a_graph_wait_for_launches_unless_a_step_waits_for_one_or_the_stage_goes(
    rig: RestoredRig,
) -> None:
    plan, pace = plan_of(rig), CountedPace()
    plan._pace = pace
    plan._beside()
    assert pace.waits == 1
    order, plan._order = plan._order, replace(plan._order, asked=(1,))
    plan._beside()
    plan._order, plan._closing = order, True
    plan._beside()
    assert pace.waits == 1


def test_steps_of_restored_graphs_set_the_pace(rig: RestoredRig) -> None:
    step = rig.supply(1)
    assert step is not None
    assert plan_of(rig)._pace._launched_s is None, "a trial is no step"
    step.graph.replay()
    assert plan_of(rig)._pace._launched_s is not None


class Sampled:
    """What a rehearsal is of."""

    def __init__(self, stage: Stage = WHOLE) -> None:
        self.seen: list[object] = []
        self.refuses: RuntimeError | None = None
        self.has_trials = True
        self.memory = SimpleNamespace(
            stage=stage,
            dtype=Dtype.BFLOAT16,
            decoder=SimpleNamespace(spec=SimpleNamespace(whole=WHOLE, vocab_size=48)),
            arena=SimpleNamespace(device=torch.device("cpu")),
        )

    def launch(self, logits: Tensor, specs: object) -> Any:
        if self.refuses is not None:
            raise self.refuses
        self.seen.append((tuple(logits.shape), logits.dtype, specs))
        return SimpleNamespace(inputs="tokens")

    def rehearse(self, inputs: object) -> None:
        self.seen.append(inputs)

    def rehearsal(self) -> Rehearsal:
        return Rehearsal(cast("Any", self.memory), self, self)


SAMPLED = (1, 48), torch.bfloat16, [GREEDY]


def test_a_rehearsal_samples_nothing_and_does_what_is_around_trials_once() -> None:
    stage = Sampled()
    rehearsal = stage.rehearsal()
    rehearsal()
    rehearsal()
    assert stage.seen == [SAMPLED, "tokens"]


def test_without_trials_only_the_sampler_is_rehearsed_and_ranges_have_none() -> None:
    stage, part = Sampled(), Sampled(Stage(0, 2))
    stage.has_trials = False
    stage.rehearsal()()
    part.rehearsal()()
    assert (stage.seen, part.seen) == ([SAMPLED], [])


def test_a_rehearsal_without_memory_is_none_and_any_other_failure_is_one() -> None:
    stage = Sampled()
    stage.refuses = torch.OutOfMemoryError("CUDA out of memory")
    stage.rehearsal()()
    assert stage.seen == []
    stage.refuses = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        stage.rehearsal()()


def test_nothing_is_rehearsed_on_cores(driver: Any, checkpoint: Any) -> None:
    """And nothing tried: what is first used there takes no longer."""
    run = driver(BatchLimits(step_tokens=64, running=8))
    run.load(checkpoint("qwen2"), kv_tokens=64)
    compute = run.engine._stages[InstanceId("i")].compute
    assert compute.rehearse.__name__ == "_nothing"
    assert compute.arriving.__name__ == "_nothing_of"


def test_a_stage_says_how_many_requests_its_last_part_is_waited_for_by(
    driver: Any, checkpoint: Any
) -> None:
    model, asked = checkpoint("qwen2"), []
    run = driver(BatchLimits(step_tokens=64, running=8))
    run.load(model, kv_tokens=64)
    stage = run.engine._stages[InstanceId("i")]
    stage.compute = replace(stage.compute, arriving=asked.append)
    stage.parameters.behind_last()
    run.add("a", [1, 2, 3], max_tokens=2)
    stage.parameters.behind_last()
    assert asked == [0, 1]
