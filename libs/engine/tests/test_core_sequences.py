"""2,000 random lives of a stage: no block leaks or is shared wrongly, nobody starves, and nobody's tokens depend on the others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_stage import PaperStage, expected_output

from pilotlight.engine.core.lifecycle import RequestState
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchLimits
from pilotlight.engine.errors import NoRoom

SEQUENCES = 2000
ROUNDS = 8
"""As many parametrized cases share them."""


def random_prompt(chance: random.Random) -> list[int]:
    """Of few kinds, so that prefixes are often equal: for nothing, for some blocks, up to the last token."""
    kind = random.Random(chance.randrange(2)).choices(range(3), k=64)
    return kind[: chance.choice((1, 5, 15, 16, 17, 31, 32, 33, 40, 48, 64))] + [chance.randrange(3)] * chance.randrange(3)


def assert_output(request: Request) -> None:
    """It has the tokens of a request that is alone, as far as it came."""
    prompt_ids = request.token_ids[: request.prompt_tokens]
    assert request.token_ids[request.prompt_tokens :] == expected_output(prompt_ids, request.sampling.seed, request.position)


def live(seed: int) -> PaperStage:
    """One random life, from the first submit to the last token."""
    chance = random.Random(seed)
    step_tokens = chance.choice((1, 3, 8, 17, 40, 200))
    limits = BatchLimits(
        step_tokens=step_tokens, running=chance.randint(1, min(step_tokens, 6)), prefix_cache=chance.random() < 0.8
    )
    stage = PaperStage(chance.choice((2, 4, 6, 8, 12, 40)), limits)
    for _ in range(chance.randint(5, 40)):
        move = chance.random()
        if move < 0.35:
            deadline_s = stage.now_s + chance.randrange(30) if chance.random() < 0.1 else None
            try:
                stage.submit(random_prompt(chance), chance.randint(1, 40), chance.randrange(2), deadline_s)
            except NoRoom:
                continue
        elif move < 0.42 and stage.scheduler.requests:
            dropped = chance.choice(stage.scheduler.requests)
            free_blocks, waited = stage.pool.free_blocks, dropped.state is not RequestState.RUNNING
            stage.drop(dropped)
            assert waited or stage.pool.free_blocks >= free_blocks
            stage.check()
        else:
            stage.now_s += 1
            stage.step()
    stage.drain()
    return stage


@pytest.mark.slow
@pytest.mark.parametrize("part", range(ROUNDS))
def test_random_lives(part):
    preemptions = hits = overdue = 0
    for seed in range(part, SEQUENCES, ROUNDS):
        stage = live(seed)
        assert len(stage.ended) == len(stage.arrived), f"sequence {seed}"
        for request in stage.ended.values():
            assert_output(request)
        preemptions += stage.preemptions
        hits += stage.hit_tokens
        overdue += len(stage.overdue)
    assert min(preemptions, hits, overdue) > 0, "the sequences reach what they are to test"


REQUESTS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=8
)
"""Kind of prompt, its tokens, output tokens, steps before it comes."""


@given(requests=REQUESTS, num_blocks=st.integers(8, 20), step_tokens=st.integers(1, 50), prefix_cache=st.booleans())
@settings(max_examples=150, deadline=None)
def test_output_is_that_of_each_request_alone(requests, num_blocks, step_tokens, prefix_cache):
    limits = BatchLimits(step_tokens=step_tokens, running=min(step_tokens, 4), prefix_cache=prefix_cache)
    stage = PaperStage(num_blocks, limits)
    submitted = []
    for kind, prompt_tokens, output_tokens, pause in requests:
        for _ in range(pause):
            stage.step()
        submitted.append(stage.submit([kind] * prompt_tokens, output_tokens))
    stage.drain()
    for request, (_, _, output_tokens, _) in zip(submitted, requests, strict=True):
        assert request.position == output_tokens
        assert_output(request)


def test_the_same_calls_give_the_same_plans():
    def plans(seed):
        chance, stage = random.Random(seed), PaperStage(8, BatchLimits(step_tokens=20, running=5))
        for _ in range(12):
            stage.submit(random_prompt(chance), chance.randint(1, 30))
        return [stage.step() for _ in range(60)], stage.preemptions

    first = plans(3)
    assert plans(3) == first
    assert first[1] > 0
