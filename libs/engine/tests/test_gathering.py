"""Requests that come one after the other share their first step, and none waits for long."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.core.batch import Plan
from pilotlight.engine.core.blocks import BlockPool
from pilotlight.engine.core.gathering import gathers
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import RequestKey, Sampling

LIMITS = BatchLimits(step_tokens=64, chunk_tokens=40, running=32, gather_s=0.010, gather_running=2)


def request(number: int, prompt_tokens: int = 5, queued_s: float = 0.0) -> Request:
    made = Request(
        RequestKey(RequestId(f"r{number}"), 1),
        [number + 1] * prompt_tokens,
        (),
        Sampling(seed=0, max_tokens=50, temperature=0.0),
        1000,
    )
    made.queued_s = queued_s
    return made


def scheduler_with(
    running: int, limits: BatchLimits = LIMITS, num_blocks: int = 64
) -> tuple[BatchScheduler, Plan]:
    """Requests that run, and the plan of their first tokens, which is still to be booked."""
    scheduler = BatchScheduler(BlockTables(BlockPool(num_blocks), "m"), limits)
    for number in range(running):
        scheduler.submit(request(number))
    return scheduler, scheduler.schedule(0.0)


def taken(scheduler: BatchScheduler, now_s: float) -> Sequence[str]:
    return [str(one.key.request_id) for one in scheduler.schedule(now_s).requests]


@pytest.mark.parametrize(
    ("running", "waiting", "now_s", "gathered"),
    [
        (3, [request(0, 5, 1.0), request(1, 5, 1.002)], 1.004, True),
        (2, [request(0, 5, 1.0), request(1, 5, 1.002)], 1.004, False),
        (3, [request(0, 5, 1.0)], 1.004, False),
        (3, [request(0, 5, 1.0), request(1, 5, 1.002)], 1.0101, False),
        (3, [request(0, 30, 1.0), request(1, 31, 1.002)], 1.004, False),
        (3, [request(0, 30, 1.0), request(1, 30, 1.002)], 1.004, True),
        (3, [request(0, 5, 1.0), request(1, 40, 1.002)], 1.004, False),
        (3, [], 1.0, False),
    ],
    ids=["gathers", "few run", "alone", "long enough", "fill a step", "all but", "long", "none"],
)
def test_the_rules(running: int, waiting: list[Request], now_s: float, gathered: bool) -> None:
    assert gathers(LIMITS, running, waiting, now_s) == gathered


@pytest.mark.parametrize(
    ("launches_s", "prompt_tokens", "waited_s", "gathered"),
    [
        (0.012, 5, 0.023, True),
        (0.012, 5, 0.0241, False),
        (0.004, 5, 0.009, True),
        (0.004, 5, 0.0101, False),
        (0.012, 256, 0.011, False),
        (0.012, 255, 0.011, True),
    ],
    ids=["launches", "long enough", "short launches", "as long as ever", "much work", "little"],
)
def test_prompts_whose_step_is_its_launches_wait_for_twice_as_long_as_these_take(
    launches_s: float, prompt_tokens: int, waited_s: float, gathered: bool
) -> None:
    limits = BatchLimits(step_tokens=10_240, gather_s=0.010, gather_running=2)
    waiting = [request(0, prompt_tokens, 1.0), request(1, prompt_tokens, 1.002)]
    assert gathers(limits, 3, waiting, 1.0 + waited_s, launches_s) == gathered


def test_streams_have_steps_without_prompts_however_many_come() -> None:
    """One comes each 3 ms, and a step with prompts takes 12 ms of launches, one without 4."""
    limits = BatchLimits(step_tokens=10_240, gather_s=0.010, gather_running=2, keep_promises=True)
    scheduler, plan = scheduler_with(8, limits, num_blocks=1024)
    now_s, came, kinds = 0.0, 0, list[bool]()
    while now_s < 2.0:
        began_s, prompts = now_s, plan.batch.num_tokens > len(plan.requests)
        now_s += 0.012 if prompts else 0.004
        kinds.append(prompts)
        scheduler.advance(plan)
        scheduler.promises.pace.ran(plan.batch, began_s, now_s)
        for one in plan.sampled:
            one.accept(3)
        for one in [each for each in scheduler.requests if each.exhausted]:
            scheduler.end(one, RequestEvent.FINISH)
        while came * 0.003 <= now_s:
            scheduler.submit(request(100 + came, 20, came * 0.003))
            came += 1
        plan = scheduler.schedule(now_s)
    settled = kinds[len(kinds) // 2 :]
    assert 1 / 6 < sum(settled) / len(settled) < 1 / 3
    assert scheduler.running + scheduler.waiting < 256


def test_newcomers_share_a_step_that_one_of_them_waited_for() -> None:
    scheduler, plan = scheduler_with(3)
    scheduler.submit(request(7, queued_s=1.0))
    scheduler.submit(request(8, queued_s=1.004))
    following = scheduler.follow_on(plan, 1.004)
    assert following is not None, "those that run go on ahead of the host meanwhile"
    assert following.requests == plan.requests
    assert scheduler.follow_on(plan, 1.011) is None
    scheduler.advance(plan)
    for one in plan.requests:
        one.accept(3)
    assert taken(scheduler, 1.005) == ["r0", "r1", "r2"]
    assert taken(scheduler, 1.010) == ["r0", "r1", "r2", "r7", "r8"]


def test_one_that_gave_up_its_blocks_is_not_kept() -> None:
    scheduler, plan = scheduler_with(4)
    scheduler.advance(plan)
    for one in plan.requests:
        one.accept(3)
    (youngest,) = plan.requests[-1:]
    youngest.queued_s = 5.0
    scheduler._preempt(youngest)  # as a step without room does
    scheduler.submit(request(9, queued_s=5.0))
    assert taken(scheduler, 5.0) == ["r0", "r1", "r2", "r3", "r9"]


@given(
    arrivals_ms=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    prompt_tokens=st.integers(1, 90),
    step_ms=st.integers(1, 15),
)
def test_no_request_waits_longer_than_that_and_a_step(
    arrivals_ms: list[int], prompt_tokens: int, step_ms: int
) -> None:
    """With room for all of them, and steps that take as long as they take."""
    limits = BatchLimits(step_tokens=4096, running=64, gather_s=0.010, gather_running=2)
    scheduler, plan = scheduler_with(3, limits, num_blocks=512)
    waits = dict(enumerate(sorted(arrivals_ms), start=10))
    now_ms, bound_ms = 0, 10 + step_ms
    while waits or scheduler.waiting:
        scheduler.advance(plan)
        for one in plan.sampled:
            one.accept(3)
        for one in [each for each in scheduler.requests if each.exhausted]:
            scheduler.end(one, RequestEvent.FINISH)
        now_ms += step_ms
        for number in [number for number, at_ms in waits.items() if at_ms <= now_ms]:
            scheduler.submit(request(number, prompt_tokens, waits.pop(number) / 1000))
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule(now_ms / 1000)
        for one in scheduler.requests[scheduler.running :]:
            assert now_ms / 1000 - one.queued_s < bound_ms / 1000
