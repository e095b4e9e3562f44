"""One step of lookahead: a batch runs before the tokens of the one before it are known, and the
outputs do not show it.

The device here is the host: its tokens are sampled when they are asked for, and are looked at one
step later.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pilotlight.engine import resident
from pilotlight.engine.compute import Compute, compute_on
from pilotlight.engine.core import pace
from pilotlight.engine.core.batch import Batch, Plan, Segment
from pilotlight.engine.core.blocks import BlockPool
from pilotlight.engine.core.lifecycle import RequestEvent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.scheduler import BatchScheduler
from pilotlight.engine.core.tables import BlockTables
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.sampler import NotSampled, SampledToken, sample
from pilotlight.engine.engine import Engine
from pilotlight.engine.lookahead import (
    LaunchedStep,
)
from pilotlight.engine.results import StepResult
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import RequestKey, Sampling


class LateTokens:
    """Tokens that are there, and not looked at; they say so when asked for the third time."""

    followed = 0

    def __init__(self, sampled: list[SampledToken | NotSampled]) -> None:
        self._sampled = sampled
        self._asked = 0

    @property
    def there(self) -> bool:
        self._asked += 1
        return self._asked > 2

    @property
    def inputs(self) -> Tensor:
        LateTokens.followed += 1
        return torch.tensor(
            [token.token_id if isinstance(token, SampledToken) else 0 for token in self._sampled]
        )

    def wait(self) -> list[SampledToken | NotSampled]:
        return self._sampled


def launch(logits: Tensor, specs: Sequence[SampleSpec]) -> LateTokens:
    assert all(spec.simple for spec in specs)
    return LateTokens(sample(logits, specs))


def compute_ahead(*arguments: object) -> Compute:
    return replace(compute_on(*arguments), launch=launch)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """ahead(True): stages that are loaded from now on run ahead."""

    def choose(wanted: bool) -> None:
        monkeypatch.setattr(resident, "compute_on", compute_ahead if wanted else compute_on)

    return choose


def talk(
    driver: Callable[..., object], checkpoint: Callable[..., object], limits: BatchLimits
) -> dict[str, list[int]]:
    """Requests that come, stop, are aborted, lose blocks, and need more than simple sampling, in
    the middle of others.
    """
    run = driver(limits)
    run.load(checkpoint("qwen2"), kv_tokens=512)
    dice = random.Random(5)
    for number in range(24):
        prompt = [dice.randrange(199) for _ in range(dice.randrange(1, 50))]
        stops = tuple(dice.sample(range(199), 12)) if number % 3 == 0 else ()
        strange = {3: {"top_k": 5}, 17: {"repetition_penalty": 1.2}}.get(number, {})
        max_tokens = 3 if strange else dice.randrange(1, 40)
        if number % 4 == 0:
            strange = {"logprobs": True, "top_logprobs": 2}
        run.add(
            f"r{number}",
            prompt,
            temperature=0.8 * (number % 2),
            stop_token_ids=stops,
            max_tokens=max_tokens,
            **strange,
        )
        for _ in range(dice.randrange(4)):
            run.step()
        if number == 11:
            run.engine.abort(RequestId("r10"), 1)
        if number == 15:
            spec = checkpoint("qwen2").spec
            row_bytes = spec.kv_bytes_per_token(spec.whole, spec.dtype)
            run.engine.resize(InstanceId("i"), spec.total_bytes + 320 * row_bytes)
            run.capacity_tokens = 320
    outputs = run.finish()
    del outputs["r10"]
    return outputs


@pytest.mark.parametrize(
    "limits",
    [
        BatchLimits(step_tokens=64, running=8),
        BatchLimits(step_tokens=16, chunk_tokens=8, running=4),
        BatchLimits(step_tokens=64, running=8, keep_promises=True),
    ],
    ids=["whole prompts", "pieces", "promises"],
)
def test_nobody_can_tell(
    driver: Callable[..., object],
    checkpoint: Callable[..., object],
    ahead: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    limits: BatchLimits,
) -> None:
    ahead(False)
    plain = talk(driver, checkpoint, limits)
    ahead(True)
    followed, with_prompts, follow_on = 0, 0, BatchScheduler.follow_on

    def counted(self: BatchScheduler, *asked: object) -> Plan | None:
        nonlocal followed, with_prompts
        plan = follow_on(self, *asked)
        if plan is not None:
            followed += 1
            with_prompts += any(segment.count > 1 for segment in plan.batch.segments)
        return plan

    monkeypatch.setattr(BatchScheduler, "follow_on", counted)
    assert talk(driver, checkpoint, limits) == plain
    assert followed > 20
    assert with_prompts > 2


def test_nobody_can_tell_who_came_while_the_host_had_nothing_to_do(
    driver: Callable[..., object],
    checkpoint: Callable[..., object],
    ahead: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = BatchLimits(step_tokens=64, running=8, keep_promises=True)
    ahead(False)
    plain = talk(driver, checkpoint, limits)
    ahead(True)
    monkeypatch.setattr(pace, "UNSURE_SHARE", -20.0)
    rests = 0

    def counted(self: Engine) -> StepResult:
        nonlocal rests
        rests += self.rest_s > 0
        return step(self)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", counted)
    assert talk(driver, checkpoint, limits) == plain
    assert rests > 20


def test_a_stages_first_token_waits_for_no_other_batch(
    driver: Callable[..., object],
    checkpoint: Callable[..., object],
    prompts: list[list[int]],
    ahead: Callable[[bool], None],
) -> None:
    """What a decode step has yet to prove or to load would lie before it."""
    ahead(True)
    run = driver()
    run.load(checkpoint("qwen2"), kv_tokens=512)
    run.add("a", prompts[0], max_tokens=6)
    before, followed = LateTokens.followed, []
    while run.engine.has_work:
        run.step()
        followed.append(LateTokens.followed - before)
    assert followed[0] == 0
    assert followed[1:3] == [1, 2], "from the second on"


def scheduler_with(
    num_blocks: int, running: int, *lengths: int, max_tokens: int = 10
) -> BatchScheduler:
    scheduler = BatchScheduler(
        BlockTables(BlockPool(num_blocks), "m"), BatchLimits(step_tokens=64, running=running)
    )
    for number, length in enumerate(lengths):
        sampling = Sampling(seed=0, max_tokens=max_tokens, temperature=0.0)
        prompt = [number + 1] * length
        scheduler.submit(
            Request(RequestKey(RequestId(f"r{number}"), 1), prompt, (), sampling, 1000)
        )
    return scheduler


def segments_of(plan: Plan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return [(segment.start, segment.count) for segment in plan.batch.segments]


def test_a_plan_is_followed_by_the_next_token_of_each() -> None:
    scheduler = scheduler_with(8, 4, 16, 5)
    plan = scheduler.schedule(0.0)
    following = scheduler.follow_on(plan)
    assert segments_of(following) == [(16, 1), (5, 1)]
    assert following is not None
    assert [len(segment.blocks) for segment in following.batch.segments] == [2, 1]
    assert following.sampled == plan.requests


@pytest.mark.parametrize(
    ("num_blocks", "running", "lengths", "max_tokens"),
    [(8, 1, (5, 5), 1), (8, 4, (100,), 10), (1, 4, (16,), 0), (8, 4, (5,), 1)],
    ids=[
        "a request waits for the place of one that ends",
        "a prompt is in the middle",
        "no room",
        "all end",
    ],
)
def test_a_plan_is_not_followed_blindly(
    num_blocks: int, running: int, lengths: tuple[int, ...], max_tokens: int
) -> None:
    scheduler = scheduler_with(num_blocks, running, *lengths, max_tokens=max_tokens or 10)
    assert scheduler.follow_on(scheduler.schedule(0.0)) is None


def test_a_full_house_is_followed_though_others_wait() -> None:
    scheduler = scheduler_with(8, 1, 5, 5)
    assert segments_of(scheduler.follow_on(scheduler.schedule(0.0))) == [(5, 1)]


@pytest.mark.parametrize(
    ("num_blocks", "followed"), [(7, False), (6, True)], ids=["room for both", "none"]
)
def test_a_house_without_room_is_followed_though_others_wait(
    num_blocks: int, followed: bool
) -> None:
    """Three blocks for the first, one that stays free for it, and three that the second would
    need.
    """
    scheduler = scheduler_with(num_blocks, 4, 40)
    plan = scheduler.schedule(0.0)
    sampling = Sampling(seed=0, max_tokens=10, temperature=0.0)
    scheduler.submit(Request(RequestKey(RequestId("second"), 1), [9] * 40, (), sampling, 1000))
    following = scheduler.follow_on(plan)
    assert (following is not None) == followed
    if followed:
        assert segments_of(following) == [(40, 1)]


def streaming(scheduler: BatchScheduler) -> Plan:
    """The plan of a step of streams alone, under way; those before it are booked."""
    plan = scheduler.schedule(0.0)
    while any(segment.count > 1 for segment in plan.batch.segments):
        scheduler.advance(plan)
        for one in plan.sampled:
            one.accept(3)
        plan = scheduler.schedule(0.0)
    return plan


def come(scheduler: BatchScheduler, length: int) -> Request:
    """One more, whose prompt is its own."""
    sampling = Sampling(seed=0, max_tokens=10, temperature=0.0)
    request = Request(RequestKey(RequestId("new"), 1), range(length), (), sampling, 1000)
    scheduler.submit(request)
    return request


def test_a_prompt_joins_what_follows_a_step_of_streams() -> None:
    scheduler = scheduler_with(16, 4, 16, 5)
    plan = streaming(scheduler)
    newcomer = come(scheduler, 30)
    following = scheduler.follow_on(plan, 0.0)
    assert segments_of(following) == [(17, 1), (6, 1), (0, 30)]
    assert following is not None
    assert following.sampled == (*plan.requests, newcomer)
    assert following.prefix_looked_up_tokens == 30
    scheduler.advance(plan)
    for one in plan.requests:
        one.accept(3)
    scheduler.advance(following)
    assert [one.wanted for one in following.requests] == [0, 0, 0], "each has a token to come"


def test_a_long_prompt_goes_on_in_what_follows() -> None:
    scheduler = scheduler_with(16, 4, 5)
    come(scheduler, 150)
    scheduler.advance(plan := scheduler.schedule(0.0))
    assert segments_of(plan) == [(0, 5), (0, 59)]
    plan.requests[0].accept(3)
    alone = scheduler.schedule(0.0, at_most=1)
    assert segments_of(alone) == [(5, 1)]
    assert segments_of(scheduler.follow_on(alone, 0.0)) == [(6, 1), (59, 63)]


def test_what_follows_a_step_with_prompts_is_known_where_its_end_is() -> None:
    scheduler = scheduler_with(32, 4, 5)
    long = come(scheduler, 150)
    plan = scheduler.schedule(0.0)
    assert segments_of(plan) == [(0, 5), (0, 59)]
    assert scheduler.follow_on(plan, 0.0) is None
    following = scheduler.follow_on(plan, 0.0, ends_s=0.1)
    assert segments_of(following) == [(5, 1), (59, 63)]
    scheduler.advance(plan)
    plan.requests[0].accept(3)
    assert following is not None
    scheduler.advance(following)
    assert segments_of(scheduler.follow_on(following, 0.1, ends_s=0.2)) == [(6, 1), (122, 28)]
    assert long.wanted == 28


def test_none_joins_that_may_not_run_before_tokens_are_known() -> None:
    scheduler = scheduler_with(16, 4, 16, 5)
    plan = streaming(scheduler)
    newcomer = come(scheduler, 30)
    assert scheduler.follow_on(plan, 0.0, lambda request: request is not newcomer) is None
    assert scheduler.waiting == 1
    assert segments_of(scheduler.follow_on(plan, 0.0)) == [(17, 1), (6, 1), (0, 30)]


def test_what_follows_has_tokens_of_streams_and_of_prompts() -> None:
    scheduler = scheduler_with(16, 4, 16, 5)
    plan = streaming(scheduler)
    plan.requests[0].sampling = replace(plan.requests[0].sampling, max_tokens=2)
    come(scheduler, 4)
    following = scheduler.follow_on(plan, 0.0)
    assert segments_of(following) == [(6, 1), (0, 4)], "the first ends with what is under way"
    tokens = LateTokens([SampledToken(71, None), SampledToken(72, None)])
    step = LaunchedStep(plan, (1, 1), tokens)
    assert following is not None
    assert step.inputs_of(following).tolist() == [72, 0, 1, 2, 3]


def test_a_plan_for_some_of_its_requests() -> None:
    plan = scheduler_with(8, 4, 3, 4, 5).schedule(0.0)
    kept = plan.only({0, 2})
    assert kept.requests == (plan.requests[0], plan.requests[2])
    assert kept.batch == Batch((plan.batch.segments[0], plan.batch.segments[2]))
    assert kept.batch.segments[1] == Segment(0, 5, plan.batch.segments[2].blocks, wants_logits=True)


def test_one_that_came_back_under_the_same_key_is_another_one() -> None:
    """It was released in mid-generation and came back with less of its output."""
    scheduler = scheduler_with(8, 4, 16)
    plan = scheduler.schedule(0.0)
    (request,) = plan.requests
    scheduler.advance(plan)
    scheduler.end(request, RequestEvent.DROP)
    scheduler.submit(Request(request.key, [1] * 4, (), request.sampling, 1000))
    assert segments_of(scheduler.schedule(0.0)) == [(0, 4)]
    assert scheduler.follow_on(plan) is None
