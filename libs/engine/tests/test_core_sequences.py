"""2,000 random lives of a stage: no block leaks or is shared wrongly, no request starves, and no
tokens depend on other requests.
"""

import random
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_stage import PaperStage, expected_output, next_token

from pilotlight.engine.core.lifecycle import RequestEvent, RequestState
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.errors import NoRoom

SEQUENCES = 2000
ROUNDS = 8
"""As many parametrized cases share them."""


def random_prompt(chance: random.Random) -> list[int]:
    """Of few kinds, so that prefixes are often equal: for nothing, for some blocks, up to the last
    token.
    """
    kind = random.Random(chance.randrange(2)).choices(range(3), k=64)
    return kind[: chance.choice((1, 5, 15, 16, 17, 31, 32, 33, 40, 48, 64))] + [
        chance.randrange(3)
    ] * chance.randrange(3)


def assert_output(request: Request) -> None:
    """It has the tokens of a request that is alone, as far as it came."""
    prompt_ids = request.token_ids[: request.prompt_tokens]
    assert request.token_ids[request.prompt_tokens :] == expected_output(
        prompt_ids, request.sampling.seed, request.position
    )


def live(seed: int) -> PaperStage:
    """One random life, from the first submit to the last token."""
    chance = random.Random(seed)
    step_tokens = chance.choice((1, 3, 8, 17, 40, 200))
    limits = BatchLimits(
        step_tokens=step_tokens,
        running=chance.randint(1, min(step_tokens, 6)),
        chunk_tokens=chance.choice((None, 1, 4, 30)),
        keep_promises=chance.random() < 0.5,
        prefix_cache=chance.random() < 0.8,
    )
    stage = PaperStage(chance.choice((2, 4, 6, 8, 12, 40)), limits)
    for _ in range(chance.randint(5, 40)):
        move = chance.random()
        if move < 0.35:
            deadline_s = stage.now_s + chance.randrange(30) if chance.random() < 0.1 else None
            try:
                stage.submit(
                    random_prompt(chance), chance.randint(1, 40), chance.randrange(2), deadline_s
                )
            except NoRoom:
                continue
        elif move < 0.42 and stage.scheduler.requests:
            dropped = chance.choice(stage.scheduler.requests)
            free_blocks, waited = stage.pool.free_blocks, dropped.state is not RequestState.RUNNING
            stage.drop(dropped)
            assert waited or stage.pool.free_blocks >= free_blocks
            stage.check()
        elif move < 0.49 and stage.scheduler.requests:
            stage.move(chance.choice(stage.scheduler.requests), with_kv=chance.random() < 0.7)
        elif move < 0.53:
            try:
                stage.resize(chance.choice((2, 4, 6, 8, 12, 40)))
            except NoRoom:
                stage.check()
        else:
            stage.now_s += 1
            stage.step()
    stage.drain()
    return stage


@pytest.mark.slow
@pytest.mark.parametrize("part", range(ROUNDS))
def test_random_lives(part):
    preemptions = hits = overdue = adopted = 0
    for seed in range(part, SEQUENCES, ROUNDS):
        stage = live(seed)
        assert len(stage.ended) == len(stage.arrived), f"sequence {seed}"
        for request in stage.ended.values():
            assert_output(request)
        preemptions += stage.preemptions
        hits += stage.hit_tokens
        overdue += len(stage.overdue)
        adopted += stage.adopted
    assert min(preemptions, hits, overdue, adopted) > 0, "the sequences reach what they are to test"


REQUESTS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(1, 30), st.integers(0, 4)),
    min_size=1,
    max_size=8,
)
"""Kind of prompt, its tokens, output tokens, steps before it comes."""


@given(
    requests=REQUESTS,
    num_blocks=st.integers(8, 20),
    step_tokens=st.integers(1, 50),
    chunk_tokens=st.none() | st.integers(1, 50),
    prefix_cache=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_output_is_that_of_each_request_alone(
    requests, num_blocks, step_tokens, chunk_tokens, prefix_cache
):
    limits = BatchLimits(
        step_tokens=step_tokens,
        running=min(step_tokens, 4),
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
    )
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


class PaperPipeline(PaperStage):
    """Micro-batches whose tokens come later, in order.

    Memory stands for that of every stage: frames keep their order.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.under_way: deque[list[tuple[Request, int, int]]] = deque()

    def dispatch(self, depth: int) -> bool:
        """Whether a micro-batch could be made."""
        present = self.scheduler.running + self.scheduler.waiting
        plan = self.scheduler.schedule(self.now_s, at_most=-(-present // depth))
        self.preemptions += plan.preempted
        assert len(plan.requests) <= -(-present // depth)
        assert sum(segment.count for segment in plan.batch.segments) <= self.limits.step_tokens
        assert plan.requests or self.under_way, "a request can run, or waits for a token"
        self._run(plan.requests, plan.batch.segments)
        self.scheduler.advance(plan)
        if plan.requests:
            tokens = [
                next_token(self._contents_of(request)[-1], request.sampling.seed)
                for request in plan.sampled
            ]
            takes = [request.takes for request in plan.sampled]
            self.under_way.append(list(zip(plan.sampled, takes, tokens, strict=True)))
        self.check()
        return bool(plan.requests)

    def collect(self) -> None:
        """The oldest micro-batch comes back.

        A request that lost its blocks meanwhile gets nothing from it.
        """
        for request, takes, token_id in self.under_way.popleft():
            if request.state is RequestState.RUNNING and request.takes == takes:
                self.scheduler.vouch(request)
                if request.accept(token_id):
                    self.scheduler.end(request, RequestEvent.FINISH)
                    self.ended[request.key] = request
        self.check()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_random_lives_of_a_pipeline(part):
    preemptions = late = 0
    for seed in range(part, 400, 2):
        chance = random.Random(seed)
        depth, step_tokens = chance.randint(2, 4), chance.choice((3, 8, 40))
        limits = BatchLimits(
            step_tokens=step_tokens,
            running=chance.randint(1, min(step_tokens, 8)),
            chunk_tokens=chance.choice((None, 2, 16)),
        )
        stage = PaperPipeline(chance.choice((6, 8, 12, 40)), limits)
        arriving, rounds = chance.randint(3, 12), 0
        while arriving or stage.scheduler.has_work:
            rounds += 1
            assert rounds < 20_000, f"sequence {seed} does not end"
            if arriving and chance.random() < 0.2:
                arriving -= 1
                with suppress(NoRoom):
                    stage.submit(random_prompt(chance), chance.randint(1, 30), chance.randrange(2))
            if not stage.scheduler.has_work:
                continue
            if chance.random() < 0.03:
                stage.drop(chance.choice(stage.scheduler.requests))
                late += bool(stage.under_way)
            elif (
                len(stage.under_way) == depth
                or (stage.under_way and chance.random() < 0.4)
                or not stage.dispatch(depth)
            ):
                stage.collect()
        assert len(stage.ended) == len(stage.arrived)
        for request in stage.ended.values():
            assert_output(request)
        preemptions += stage.preemptions
    assert min(preemptions, late) > 0, "the sequences reach what they are to test"
