"""Continuous batching, decided without a tensor."""

import subprocess
import sys

import pytest
from paper_stage import PaperStage, expected_output

from pilotlight.engine.core.blocks import blocks_for
from pilotlight.engine.core.lifecycle import TRANSITIONS, RequestEvent, RequestState, step
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import EngineFailed, NoRoom
from pilotlight.policy.fairness import FairShare
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import RequestKey, Sampling


def prompt(kind: int, num_tokens: int) -> list[int]:
    """Prompts of different kinds share nothing."""
    return [100 * kind + position for position in range(num_tokens)]


def states(stage: PaperStage) -> str:
    """The row, by the first letters of its states."""
    return "".join(request.state.value[0] for request in stage.scheduler.requests)


def test_a_step_has_so_many_tokens_and_streams_come_first():
    stage = PaperStage(100, BatchLimits(step_tokens=10, running=10))
    stage.submit(prompt(0, 4), 8)
    assert stage.step() == [("r0", 0, 4)]
    stage.submit(prompt(1, 23), 2)
    stage.submit(prompt(2, 3), 2)
    assert stage.step() == [("r0", 4, 5), ("r1", 0, 9)]
    assert stage.step() == [("r0", 5, 6), ("r1", 9, 18)]
    assert stage.step() == [("r0", 6, 7), ("r1", 18, 23), ("r2", 0, 3)]
    assert stage.step() == [("r0", 7, 8), ("r1", 23, 24), ("r2", 3, 4)]
    assert states(stage) == "r"


def test_a_long_prompt_is_cut_where_others_get_tokens_and_short_ones_share_a_step():
    stage = PaperStage(100, BatchLimits(step_tokens=40, chunk_tokens=5, running=10))
    stage.submit(prompt(0, 12), 9)
    assert stage.step() == [("r0", 0, 12)], "nobody waits for a token meanwhile"
    for kind, num_tokens in enumerate((4, 5, 13, 3), start=1):
        stage.submit(prompt(kind, num_tokens), 9)
    assert stage.step() == [("r0", 12, 13), ("r1", 0, 4), ("r2", 0, 5), ("r3", 0, 7)]
    assert stage.step()[3:] == [("r3", 7, 13), ("r4", 0, 3)]


@pytest.mark.parametrize(
    ("num_tokens", "pieces"),
    [(10, [10]), (15, [15]), (16, [8, 8]), (25, [13, 12]), (30, [15, 15]), (31, [11, 10, 10])],
)
def test_a_prompt_has_as_few_pieces_as_can_be_of_about_one_length(
    num_tokens: int, pieces: list[int]
):
    stage = PaperStage(100, BatchLimits(step_tokens=40, chunk_tokens=10, running=10))
    stage.submit(prompt(0, 1), 20)
    stage.step()
    stage.submit(prompt(1, num_tokens), 1)
    taken = [stop - start for _ in pieces for name, start, stop in stage.step() if name == "r1"]
    assert taken == pieces


def test_every_stream_gets_a_token_in_every_step():
    stage = PaperStage(100, BatchLimits(step_tokens=4, running=4))
    for kind in range(3):
        stage.submit(prompt(kind, 1), 20)
    stage.submit(prompt(3, 9), 2)
    assert [name for name, _, _ in stage.step()] == ["r0", "r1", "r2", "r3"]
    for start in range(1, 9):
        assert stage.step()[3:] == [("r3", start, start + 1)], (
            "a long prompt gets what is left, at least one"
        )


@pytest.mark.parametrize(("step_tokens", "running"), [(4, 5), (4, 0), (0, 0)])
def test_limits_under_which_somebody_might_starve_are_refused(step_tokens, running):
    with pytest.raises(ValueError, match="running must be"):
        BatchLimits(step_tokens=step_tokens, running=running)


def test_the_head_of_the_queue_is_not_overtaken():
    stage = PaperStage(4, BatchLimits())
    for kind, prompt_tokens in enumerate((30, 40, 5)):
        stage.submit(prompt(kind, prompt_tokens), 2)
    assert stage.step() == [("r0", 0, 30)], "r1 has no room; r2 would have, and waits"
    assert (stage.scheduler.running, stage.scheduler.waiting, stage.scheduler.kv_free_tokens) == (
        1,
        2,
        32,
    )
    assert stage.step() == [("r0", 30, 31)]
    assert stage.step() == [("r1", 0, 40)], "a block for r1's next tokens stays free"
    assert stage.step() == [("r1", 40, 41)]
    assert stage.step() == [("r2", 0, 5)]


def test_no_more_run_than_the_limit():
    stage = PaperStage(100, BatchLimits(running=2))
    for kind in range(3):
        stage.submit(prompt(kind, 3), 1)
    assert [name for name, _, _ in stage.step()] == ["r0", "r1"]
    assert [name for name, _, _ in stage.step()] == ["r2"]
    assert not stage.scheduler.has_work


def test_equal_prefixes_are_computed_once():
    stage = PaperStage(20, BatchLimits())
    stage.submit(prompt(0, 40), 30)
    assert stage.step() == [("r0", 0, 40)]
    stage.submit([*prompt(0, 40), 7], 2)
    stage.submit(prompt(0, 20), 2)
    stage.submit(prompt(0, 32), 2)
    assert stage.step() == [("r0", 40, 41), ("r1", 32, 41), ("r2", 16, 20), ("r3", 16, 32)]
    assert stage.hit_tokens == 64, "full blocks only, and never the last token"
    assert stage.pool.num_blocks - stage.pool.free_blocks == 3 + 1 + 1 + 1
    stage.drain()
    assert stage.pool.cached_blocks == 4, (
        "64 tokens of r0 are in full blocks; the others' blocks hold the same or are not full"
    )


def test_equal_prompts_that_come_at_once_are_computed_once():
    """As several answers to one prompt do.

    A request for something else meanwhile loses no more than the rest of a step.
    """
    stage = PaperStage(40, BatchLimits(step_tokens=32, running=8))
    answers = [stage.submit(prompt(0, 50), 20, seed=seed) for seed in range(3)]
    other = stage.submit(prompt(1, 12), 20)
    assert stage.step() == [("r0", 0, 32)]
    assert stage.step() == [("r0", 32, 50)], "r3 is behind the two that wait for r0's blocks"
    assert stage.step() == [("r0", 50, 51), ("r1", 48, 50), ("r2", 48, 50), ("r3", 0, 12)]
    assert stage.hit_tokens == 96
    stage.drain()
    assert [answer.token_ids[50:] for answer in answers] == [
        expected_output(prompt(0, 50), seed, 20) for seed in range(3)
    ]
    assert other.token_ids[12:] == expected_output(prompt(1, 12), 0, 20)


def test_a_short_common_prefix_is_not_worth_a_step():
    """A system prompt that many share, before what each of them asks."""
    stage = PaperStage(40, BatchLimits())
    for kind in range(3):
        stage.submit([*prompt(0, 16), *prompt(kind + 1, 40)], 2)
    assert [computed for _, *computed in stage.step()] == [[0, 56]] * 3
    stage.drain()


class Grammar:
    """One that has not said which token may come first."""

    def __init__(self, *, late: bool) -> None:
        self.late = late

    def accept(self, token_id: int) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize(("late", "ran"), [(False, [1]), (True, [40])])
def test_nobody_waits_for_a_prompt_whose_grammar_is_late(late, ran):
    """What follows it may not be known for seconds, and until then its blocks are not vouched
    for.
    """
    stage = PaperStage(40, BatchLimits())
    first = stage.submit(prompt(0, 40), 20)
    stage.scheduler.advance(stage.scheduler.schedule(0.0))
    stage.scheduler.postpone(first)
    first.control = Grammar(late=late)
    stage.submit(prompt(0, 40), 20)
    assert [segment.count for segment in stage.scheduler.schedule(0.0).batch.segments] == ran


def test_output_is_found_as_a_prefix_too():
    """The next turn of a conversation."""
    stage = PaperStage(20, BatchLimits())
    first = stage.submit(prompt(0, 20), 30)
    stage.drain()
    stage.submit([*first.token_ids, 1, 2, 3], 2)
    assert stage.step() == [("r1", 48, 53)]


def test_without_the_prefix_cache_nothing_is_shared():
    stage = PaperStage(20, BatchLimits(prefix_cache=False))
    for _ in range(2):
        stage.submit(prompt(0, 40), 3)
        assert stage.step()[-1][1:] == (0, 40)
    assert stage.pool.cached_blocks == 0


def test_the_youngest_gives_up_its_blocks_and_comes_back_first():
    stage = PaperStage(4, BatchLimits())
    requests = [stage.submit(prompt(kind, 16), 40, seed=kind) for kind in range(3)]
    assert stage.step() == [("r0", 0, 16), ("r1", 0, 16)], "a block for each of two stays free"
    assert states(stage) == "rrw"
    while stage.preemptions == 0:
        stage.step()
    assert states(stage) == "rpw"
    assert requests[1].computed == 0
    assert [requests[kind].position for kind in range(3)] == [18, 17, 0]
    stage.drain()
    assert [requests[kind].token_ids[16:] for kind in range(3)] == [
        expected_output(prompt(kind, 16), kind, 40) for kind in range(3)
    ]


def test_a_preempted_request_finds_its_blocks_again():
    stage = PaperStage(6, BatchLimits())
    old, young = stage.submit(prompt(0, 16), 60), stage.submit(prompt(1, 16), 60)
    while stage.preemptions == 0:
        stage.step()
    stage.drop(old)
    assert len(young.token_ids) == 49
    assert stage.step() == [("r1", 32, 49)], (
        "of its three full blocks the old one needed one, the last"
    )


def test_the_youngest_sits_out_rather_than_give_up_its_own():
    stage = PaperStage(8, BatchLimits())
    requests = [stage.submit(prompt(kind, 16), 30) for kind in range(3)]
    for _ in range(17):
        assert len(stage.step()) == 3
    assert [name for name, _, _ in stage.step()] == ["r0", "r1"], (
        "there was a third block for two of them"
    )
    assert states(stage) == "rrr"
    while stage.scheduler.running == 3:
        stage.step()
    assert stage.step() == [("r2", 32, 33)]
    assert (stage.preemptions, requests[2].position) == (0, 18)


def test_a_dropped_request_frees_its_blocks_at_once_and_leaves_shared_ones():
    stage = PaperStage(20, BatchLimits())
    first = stage.submit(prompt(0, 40), 20)
    stage.step()
    second = stage.submit(prompt(0, 40), 20)
    stage.step()
    assert stage.pool.free_blocks == 16
    stage.drop(first)
    assert stage.pool.free_blocks == 17, "two of three are the second's as well"
    stage.check()
    stage.drain()
    assert second.token_ids[40:] == expected_output(prompt(0, 40), 0, 20)


@pytest.mark.parametrize(
    "state", [RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED]
)
def test_an_overdue_request_ends_in_one_step_wherever_it_stands(state):
    stage = PaperStage(4, BatchLimits())
    first = stage.submit(prompt(0, 16), 40)
    other = stage.submit(prompt(1, 16), 40, deadline_s=100.0)
    while other.state is not state:
        stage.step()
    stage.now_s = 99.9
    stage.step()
    assert not stage.overdue
    stage.now_s = 100.0
    stage.step()
    assert stage.overdue == [other]
    assert other.state is RequestState.ENDED
    assert stage.pool.num_blocks - stage.pool.free_blocks == blocks_for(len(first.token_ids) - 1), (
        "its blocks are free at once"
    )
    stage.drain()


def test_a_request_that_fits_alone_is_taken_and_no_other():
    stage = PaperStage(4, BatchLimits())
    with pytest.raises(NoRoom):
        stage.submit(prompt(0, 30), 35)
    stage.submit(prompt(0, 30), 34)
    stage.drain()


def request(prompt_tokens: int, max_tokens: int, context: int) -> Request:
    return Request(
        RequestKey(RequestId("a"), 1),
        [1] * prompt_tokens,
        [],
        Sampling(seed=0, max_tokens=max_tokens),
        context,
    )


def test_room_is_asked_for_what_a_request_can_reach():
    assert request(10, 20, context=1000).kv_tokens == 30
    assert request(10, 20, context=16).kv_tokens == 16


def test_moves_that_are_not_in_the_table_are_refused():
    for state in RequestState:
        for event in RequestEvent:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(EngineFailed, match=f"{state.value} cannot take {event.value}"):
                    step(state, event)
    assert all(source is not RequestState.ENDED for source, _ in TRANSITIONS)


def test_the_core_imports_no_tensors():
    code = (
        "import pkgutil, importlib, sys, pilotlight.engine.core as core\n"
        "for module in pkgutil.iter_modules(core.__path__): importlib.import_module(f'{core.__name__}.{module.name}')\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_tenants_take_turns_by_weight():
    """Two that always have more: what is taken up follows the weights."""
    stage = PaperStage(40, BatchLimits(running=2))
    tenants, taken = {}, []
    for number in range(120):
        of = FairShare("heavy", 3.0) if number % 2 else FairShare("light", 1.0)
        tenants[f"r{number}"] = stage.submit(prompt(number, 6), 2, share=of).share.tenant
    while len(taken) < 60:
        taken += [tenants[name] for name, start, _ in stage.step() if start == 0]
    assert taken.count("heavy") == pytest.approx(45, abs=2)


@pytest.mark.parametrize("flood", [3, 60])
def test_a_flood_delays_another_by_a_bound(flood):
    stage = PaperStage(40, BatchLimits(running=1))
    for number in range(flood):
        stage.submit(prompt(number, 6), 2, share=FairShare("flood"))
    stage.step()
    mine = stage.submit(prompt(7, 6), 2, share=FairShare("little"))
    steps = 0
    while mine.computed == 0:
        stage.step()
        steps += 1
    # What runs goes on to its end, and at most one of equal cost is before it.
    assert steps <= 1 + 2 + 1
    stage.drain()


def test_one_tenant_alone_is_served_in_its_order():
    stage = PaperStage(40, BatchLimits(running=1))
    for number in range(6):
        stage.submit(prompt(number, 40 if number % 2 else 3), 1, share=FairShare("a", 2.0))
    assert [stage.step()[0][0] for _ in range(6)] == ["r0", "r1", "r2", "r3", "r4", "r5"]


def test_one_that_was_preempted_goes_before_another_tenants():
    stage = PaperStage(5, BatchLimits())
    first = stage.submit(prompt(0, 31), 30, share=FairShare("a"))
    second = stage.submit(prompt(1, 31), 30, share=FairShare("a"))
    stage.step()
    third = stage.submit(prompt(2, 5), 2, share=FairShare("b"))
    while not second.takes or second.state is not RequestState.PREEMPTED:
        stage.step()
    assert third.takes == 0 or third.state is RequestState.ENDED
    assert next(iter(stage.scheduler.requests[1:])) is second
    stage.drain()
    assert first.token_ids[31:] == expected_output(prompt(0, 31), 0, 30)
