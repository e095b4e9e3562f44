"""Continuous batching, decided without a tensor."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.blocks import BlockPool
from pilotlight.engine.core.request import Request, RequestKey
from pilotlight.engine.core.scheduler import BatchLimits, BatchScheduler
from pilotlight.policy.types import RequestId, Sampling


def request(name: str, prompt_tokens: int, max_tokens: int, context: int = 10_000) -> Request:
    return Request(RequestKey(RequestId(name), 1), [1] * prompt_tokens, [], Sampling(seed=0, max_tokens=max_tokens), context)


def names(requests) -> list[str]:
    return [request.key.request_id for request in requests]


def run(scheduler: BatchScheduler) -> list[tuple[str, int, int]]:
    """One step whose samples are all token 5: who ran which tokens."""
    scheduler.admit(0.0)
    plan = scheduler.plan()
    scheduler.advance(plan)
    for sampled in plan.sampled:
        if sampled.accept(5):
            scheduler.end(sampled)
    return [
        (mine.key.request_id, segment.start, segment.stop)
        for mine, segment in zip(plan.requests, plan.batch.segments, strict=True)
    ]


def test_long_prompts_are_cut_and_streams_are_never_starved():
    scheduler = BatchScheduler(BlockPool(100), BatchLimits(prefill_tokens=10))
    scheduler.submit(request("stream", 4, 8))
    assert run(scheduler) == [("stream", 0, 4)]
    scheduler.submit(request("long", 23, 2))
    scheduler.submit(request("late", 3, 2))
    assert run(scheduler) == [("stream", 4, 5), ("long", 0, 10)]
    assert run(scheduler) == [("stream", 5, 6), ("long", 10, 20)]
    assert run(scheduler) == [("stream", 6, 7), ("long", 20, 23), ("late", 0, 3)]
    assert run(scheduler) == [("stream", 7, 8), ("long", 23, 24), ("late", 3, 4)]
    assert (scheduler.running, scheduler.waiting) == (1, 0)


def test_the_head_of_the_queue_is_not_overtaken():
    scheduler = BatchScheduler(BlockPool(4), BatchLimits())
    for name, prompt_tokens in (("a", 30), ("b", 40), ("c", 5)):
        scheduler.submit(request(name, prompt_tokens, 2))
    assert run(scheduler) == [("a", 0, 30)], "b has no room; c would have, and waits"
    assert (scheduler.running, scheduler.waiting, scheduler.kv_free_tokens) == (1, 2, 32)
    assert run(scheduler) == [("a", 30, 31)]
    assert run(scheduler) == [("b", 0, 40), ("c", 0, 5)]


def test_no_more_run_than_the_limit():
    scheduler = BatchScheduler(BlockPool(100), BatchLimits(running=2))
    for name in "abc":
        scheduler.submit(request(name, 3, 1))
    assert [name for name, _, _ in run(scheduler)] == ["a", "b"]
    assert [name for name, _, _ in run(scheduler)] == ["c"]
    assert not scheduler.has_work


def test_room_is_asked_for_what_a_request_can_reach():
    assert request("a", 10, 20).kv_tokens == 30
    assert request("a", 10, 20, context=16).kv_tokens == 16


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12),
    num_blocks=st.integers(5, 12),
    prefill_tokens=st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_every_request_runs_each_token_once_and_ends(sizes, num_blocks, prefill_tokens):
    scheduler = BatchScheduler(BlockPool(num_blocks), BatchLimits(prefill_tokens=prefill_tokens))
    requests = [request(str(index), prompt, output) for index, (prompt, output) in enumerate(sizes)]
    for mine in requests:
        scheduler.submit(mine)
    computed = dict.fromkeys(names(requests), 0)
    while scheduler.has_work:
        ran = run(scheduler)
        assert ran, "a step with work runs something"
        for name, start, stop in ran:
            assert start == computed[name] < stop
            computed[name] = stop
    assert [mine.position for mine in requests] == [output for _, output in sizes]
    assert scheduler.kv_free_tokens == num_blocks * 16
