"""Requests that come while a batch is about to end wait for it, and none of them for long."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_stage import PaperStage

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.ending import LONG_TIMES, awaits_end
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.promises import DELIVERY_S, Outlook, Promises
from pilotlight.engine.core.request import Request
from pilotlight.policy.fairness import NO_TENANT
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import Promise, RequestKey, Sampling

LIMITS = BatchLimits(
    step_tokens=4096, chunk_tokens=400, running=64, gather_running=4, ending_s=0.100
)
TOKEN_S, STEP_S = 0.00001, 0.005
"""What a token of a prompt adds to a step, and what a step of streams takes, on the device of these
tests."""
NEAR = 18
"""So many tokens end before a request has waited that came 10 ms ago."""
LONG_TOKENS = LONG_TIMES * NEAR


def request(name: str, prompt_tokens: int = 5, output: int = 200, queued_s: float = 0.0) -> Request:
    key = RequestKey(RequestId(name), 0)
    made = Request(key, range(prompt_tokens), (), Sampling(seed=0, max_tokens=output), 100_000)
    made.queued_s = queued_s
    return made


def stream(name: str, left: int, had: int = LONG_TOKENS) -> Request:
    made = request(name, output=had + left)
    made.token_ids += range(had)
    made.computed = len(made.token_ids) - 1
    return made


def streams(near: int, far: int) -> list[Request]:
    close = [stream(f"n{place}", NEAR) for place in range(near)]
    return close + [stream(f"f{place}", NEAR + 1, 2 * LONG_TOKENS) for place in range(far)]


def train(promises: Promises) -> None:
    """Steps of streams take the same whatever their contexts."""
    prompt = Batch((Segment(0, 1000, (0,), wants_logits=True),))
    prompt_s = 1000 * (1 + 500 / 12_000) * TOKEN_S
    promises.pace.ran(prompt, 0.0, prompt_s)
    alone = Batch((Segment(9, 1, (0,), wants_logits=True),))
    promises.pace.ran(alone, prompt_s, prompt_s + STEP_S)


def outlook(running: list[Request], now_s: float = 0.010) -> Outlook:
    promises = Promises(kept=True)
    train(promises)
    return Outlook(promises, running, now_s)


def preempted() -> Request:
    made = request("p")
    made.takes = 1
    return made


SHORT = [stream(f"s{place}", 5, LONG_TIMES * 5 - 1) for place in range(8)]
AT_LAST = [stream(f"l{place}", 1) for place in range(8)]
AGAIN = [stream(f"a{place}", 2) for place in range(8)]
for one in AGAIN:
    one.computed = 0
"""They were preempted, and what they had runs again."""


@pytest.mark.parametrize(
    ("running", "waiting", "now_s", "expected"),
    [
        (streams(8, 0), [request("w")], 0.010, True),
        (streams(4, 4), [request("w"), request("x")], 0.010, True),
        (streams(3, 4), [request("w")], 0.010, False),
        (streams(4, 0), [request("w")], 0.010, False),
        (streams(8, 0), [], 0.010, False),
        (streams(8, 0), [request("w")], 0.011, False),
        (AT_LAST, [request("w")], 0.090, True),
        (AT_LAST, [request("w")], 0.096, False),
        (AT_LAST, [request("w")], 0.100, False),
        (streams(8, 0), [request("w", queued_s=-math.inf)], 0.010, False),
        (streams(8, 0), [request("w"), request("x", 400)], 0.010, False),
        (streams(8, 0), [preempted(), request("w")], 0.010, False),
        (SHORT, [request("w")], 0.010, False),
        (AGAIN, [request("w")], 0.010, False),
    ],
    ids=[
        "all end",
        "half of them",
        "fewer",
        "few run",
        "none waits",
        "they end later",
        "the last steps",
        "the last one ends later",
        "long enough",
        "nobody said since when",
        "one is long",
        "one ran before",
        "answers are short",
        "they run again",
    ],
)
def test_the_rules(
    running: list[Request], waiting: list[Request], now_s: float, expected: bool
) -> None:
    assert awaits_end(LIMITS, waiting, outlook(running, now_s)) == expected


@pytest.mark.parametrize(
    ("first_in_s", "expected"), [(None, True), (0.3, True), (0.05, False), (-1.0, False)]
)
def test_not_where_a_first_token_could_be_late_by_it(
    first_in_s: float | None, expected: bool
) -> None:
    waiting = [request("w", 300), request("x", 300)]
    waiting[1].stands(NO_TENANT, Promise(first_token_in_s=first_in_s), 0.0)
    assert awaits_end(LIMITS, waiting, outlook(streams(8, 0))) == expected


def test_what_is_left_is_what_neither_prompts_nor_delivery_take() -> None:
    seen = outlook(streams(8, 0), now_s=1.0)
    waiting = [request("w", 300), request("x", 300)]
    assert seen.spare_s(waiting) == math.inf
    waiting[1].stands(NO_TENANT, Promise(first_token_in_s=0.2), 1.0)
    assert seen.step_s == pytest.approx(STEP_S)
    prompts_s = 2 * 300 * (1 + 150 / 12_000) * TOKEN_S
    assert seen.spare_s(waiting) == pytest.approx(0.2 - DELIVERY_S - STEP_S - prompts_s)
    unknown = Outlook(Promises(kept=True), streams(8, 0), 1.0)
    assert unknown.step_s is None
    assert not awaits_end(LIMITS, [request("y", queued_s=1.0)], unknown)
    assert unknown.spare_s(waiting) == -math.inf, "it could be anything"
    assert Outlook(Promises(kept=False), streams(8, 0), 1.0).spare_s(waiting) == math.inf


def stage_of(ending_s: float, answers: list[int]) -> PaperStage:
    """So many streams that had ``LONG_TOKENS``, at time 0."""
    limits = BatchLimits(
        step_tokens=512, chunk_tokens=40, running=40, gather_running=4, ending_s=ending_s
    )
    stage = PaperStage(1000, limits)
    train(stage.scheduler.promises)
    for left in answers:
        stage.submit([1, 2, 3], LONG_TOKENS + left)
    for _ in range(LONG_TOKENS):
        stage.step()
    return stage


def come(stage: PaperStage, prompt_tokens: int, output: int) -> Request:
    made = stage.submit([1] * prompt_tokens, output)
    made.queued_s = stage.now_s
    return made


def runs(stage: PaperStage, request: Request) -> bool:
    return any(entry[0] == request.key.request_id for entry in stage.step())


def test_a_newcomer_has_its_first_step_when_the_batch_has_ended() -> None:
    stage = stage_of(0.100, [5] * 6)
    newcomer = come(stage, 3, 3)
    assert [runs(stage, newcomer) for _ in range(6)] == [False] * 5 + [True]
    at_once = stage_of(0.0, [5] * 6)
    assert runs(at_once, come(at_once, 3, 3))


def test_those_that_run_go_on_ahead_of_the_host_until_the_batch_has_ended() -> None:
    stage = stage_of(0.100, [3] * 6 + [90] * 5)
    come(stage, 3, 3)
    followed: list[int] = []
    for _ in range(3):
        plan = stage.scheduler.schedule(stage.now_s)
        following = stage.scheduler.follow_on(plan, stage.now_s)
        assert following is not None
        followed.append(len(following.requests))
        stage.scheduler.advance(plan)
        for one in plan.sampled:
            if one.accept(0):
                stage.drop(one)
    assert followed == [11, 11, 5 + 1], "the newcomer's prompt follows the step that ends it"


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 80), st.integers(1, 45), st.integers(1, 60)), min_size=1, max_size=25
)
"""When, with how many tokens, and for how many."""


@given(
    answers=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    arrivals=ARRIVALS,
    step_ms=st.integers(1, 15),
    ending_ms=st.integers(0, 120),
)
def test_nobody_waits_longer_than_that_and_a_step_and_all_end(
    answers: list[int], arrivals: list[tuple[int, int, int]], step_ms: int, ending_ms: int
) -> None:
    """With room for all of them."""
    stage = stage_of(ending_ms / 1000, answers)
    coming = sorted(arrivals)
    made: list[Request] = []
    now_ms = 0
    while coming or stage.scheduler.has_work:
        stage.now_s = now_ms / 1000
        while coming and coming[0][0] <= now_ms:
            at_ms, *lengths = coming.pop(0)
            made.append(come(stage, *lengths))
            made[-1].queued_s = at_ms / 1000
        if stage.scheduler.has_work:
            stage.step()
        now_ms += step_ms
        for one in made:
            assert one.takes or now_ms - one.queued_s * 1000 <= ending_ms + 2 * step_ms
    assert all(one.takes == 1 for one in made)


@given(
    answers=st.lists(st.integers(NEAR + 32, 150), max_size=12),
    arrivals=ARRIVALS,
)
def test_nothing_changes_where_no_end_is_near(
    answers: list[int], arrivals: list[tuple[int, int, int]]
) -> None:
    def plans(ending_s: float) -> list[list[tuple[str, int, int]]]:
        stage, seen = stage_of(ending_s, answers), []
        for step in range(30):
            stage.now_s = step / 1000
            for at, prompt_tokens, output in arrivals:
                if at == step:
                    come(stage, prompt_tokens, output + 60)
            if stage.scheduler.has_work:
                seen.append(stage.step())
        return seen

    assert plans(NEAR * STEP_S) == plans(0.0)
