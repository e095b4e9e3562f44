"""Steps that keep what requests are promised."""

import random

import pytest
from paper_stage import PaperStage

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.pace import LEAST_PROMPT_TOKENS, LEAST_STREAMS, SAMPLES, Pace
from pilotlight.engine.core.promises import DELIVERY_S, LEAST_TOKENS, Promises
from pilotlight.engine.core.request import Request
from pilotlight.engine.core.waiting import OVERTAKEN, WaitingRow
from pilotlight.policy.fairness import NO_TENANT
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import Promise, RequestKey, Sampling

LEAST_S, STREAM_S, TOKEN_S = 0.002, 0.0001, 0.00001
"""What a step costs on the device of these tests, and what each stream and each token of a prompt
adds."""


def batch_of(streams: int, prompt_tokens: int) -> Batch:
    segments = [Segment(9, 1, (0,), wants_logits=True)] * streams
    prompts = [Segment(0, prompt_tokens, (0,), wants_logits=True)] if prompt_tokens else []
    return Batch((*segments, *prompts), (), ())


def took_s(streams: int, prompt_tokens: int) -> float:
    return LEAST_S + STREAM_S * streams + TOKEN_S * prompt_tokens


def trained(pace: Pace, streams: tuple[int, ...] = (1, 64), prompt_tokens: int = 2048) -> float:
    """Has seen steps of streams, and of prompts; when the last one ended."""
    now_s = 5.0
    for count, tokens in [(one, 0) for one in streams for _ in range(SAMPLES)] + [
        (streams[-1], prompt_tokens)
    ] * SAMPLES:
        pace.ran(batch_of(count, tokens), now_s, now_s + took_s(count, tokens))
        now_s += took_s(count, tokens)
    return now_s


def asked(
    name: str, prompt_tokens: int, promise: Promise | None, *, now_s: float = 0.0, output: int = 400
) -> Request:
    key = RequestKey(RequestId(name), 0)
    made = Request(key, range(prompt_tokens), (), Sampling(seed=0, max_tokens=output), 100_000)
    made.stands(NO_TENANT, promise, now_s)
    made.queued_s = now_s
    return made


def test_the_pace_is_what_steps_took():
    pace = Pace()
    assert pace.streams_s(4) is None
    assert pace.prompt_token_s is None
    trained(pace)
    assert pace.streams_s(1) == pytest.approx(took_s(1, 0), rel=0.06)
    assert pace.streams_s(128) == pytest.approx(took_s(128, 0), rel=0.06)
    assert pace.prompt_token_s == pytest.approx(TOKEN_S, rel=0.06)


def test_one_slow_step_says_nothing_and_few_tokens_say_nothing():
    pace = Pace()
    now_s = trained(pace)
    before = pace.streams_s(64), pace.prompt_token_s
    pace.ran(batch_of(64, 0), now_s, now_s + 3.0)
    pace.ran(batch_of(64, 2048), now_s + 3.0, now_s + 9.0)
    pace.ran(batch_of(LEAST_STREAMS - 1, 0), now_s + 9.0, now_s + 9.1)
    pace.ran(batch_of(64, LEAST_PROMPT_TOKENS - 1), now_s + 9.1, now_s + 9.5)
    assert pace.streams_s(64) == pytest.approx(before[0], rel=0.05)
    assert pace.prompt_token_s == pytest.approx(before[1], rel=0.05)


def test_streams_waited_for_what_ran_between_their_steps():
    """Another model's step, say: the time between two tokens is what is promised."""
    pace, now_s = Pace(), 0.0
    for _ in range(SAMPLES + 1):
        pace.ran(batch_of(16, 0), now_s + 0.006, now_s + 0.010)
        now_s += 0.010
    assert pace.streams_s(16) == pytest.approx(0.010, rel=0.01)


def test_a_first_token_is_in_time_while_the_prompt_can_run_before_it_is_due():
    promises = Promises(kept=True)
    trained(promises.pace)
    request = asked("r", 2000, Promise(first_token_in_s=0.2), now_s=10.0)
    last_s = 10.2 - DELIVERY_S - 2000 * TOKEN_S
    assert promises.in_time(request, last_s - 0.002)
    assert not promises.in_time(request, last_s + 0.002)
    assert Promises(kept=False).in_time(request, 99.0)
    assert promises.in_time(asked("free", 2000, None), 99.0)


def test_no_more_run_than_leave_time_for_prompts():
    """Half of 20 ms holds (10 ms - 2 ms) / 0.1 ms streams."""
    promises = Promises(kept=True)
    trained(promises.pace)
    request = asked("r", 10, Promise(token_s=0.020))
    assert not promises.crowded(75, request)
    assert promises.crowded(83, request)
    assert not promises.crowded(0, request)
    assert not promises.crowded(83, asked("free", 10, None))
    assert not promises.crowded(83, asked("hopeless", 10, Promise(token_s=0.003)))
    assert not Promises(kept=False).crowded(10_000, request)


def test_a_prompt_takes_as_long_as_the_stream_with_the_least_lead_can_wait():
    promises = Promises(kept=True)
    now_s = trained(promises.pace)
    streams = [asked(f"s{n}", 10, Promise(token_s=0.020)) for n in range(4)]
    assert promises.prompt_tokens(streams, now_s) is None, "none of them had a token"
    for stream in streams:
        stream.first_s = now_s
        stream.token_ids += range(20)
        stream.first_position = 0
    # 20 tokens are there, and 20 more are its grace: 0.8 s are due to them.
    ahead = promises.prompt_tokens(streams, now_s + 0.5)
    assert ahead == pytest.approx((0.8 - 0.5 - took_s(4, 0)) / TOKEN_S, rel=0.06)
    streams[2].first_s = now_s - 0.2
    behind = promises.prompt_tokens(streams, now_s + 0.5)
    assert behind == pytest.approx((0.8 - 0.7 - took_s(4, 0)) / TOKEN_S, rel=0.06)
    streams[2].first_s = now_s - 0.5
    assert promises.prompt_tokens(streams, now_s + 0.5) == ahead, "late already: not waited for"
    assert promises.prompt_tokens(streams[2:3], now_s + 0.29) == pytest.approx(
        (0.020 - took_s(1, 0)) / TOKEN_S, rel=0.15
    ), "at least the time of a token"
    short = asked("short", 10, Promise(token_s=0.0001))
    short.first_s = now_s + 0.5
    assert promises.prompt_tokens([short], now_s + 0.5) == LEAST_TOKENS


def test_prompts_are_not_cut_while_a_first_token_is_in_danger():
    limits = BatchLimits(step_tokens=4096, chunk_tokens=100, running=64, keep_promises=True)
    for first_in_s, ran in ((5.0, 100), (0.05, 1000)):
        stage = PaperStage(1000, limits)
        stage.submit([1, 2, 3], 90)
        stage.step()
        stage.step()
        trained(stage.scheduler.promises.pace)
        stage.submit(list(range(1000)), 5, promise=Promise(first_token_in_s=first_in_s))
        assert stage.step()[1] == ("r1", 0, ran)


def test_who_is_late_is_overtaken_so_many_times_and_no_more():
    row, late = WaitingRow(), asked("late", 5, Promise(first_token_in_s=-1.0))
    row.add(late)
    served: list[str] = []
    for number in range(40):
        row.add(asked(f"r{number}", 5, Promise(first_token_in_s=9.0)))
        first = row.first(lambda request: request.due_s is None or request.due_s > 0)
        assert row.first(lambda request: request.due_s is None or request.due_s > 0) is first
        row.serve(first)
        served.append(first.key.request_id)
    assert served.index("late") == OVERTAKEN
    assert served[:3] == ["r0", "r1", "r2"]


def test_those_that_are_late_keep_their_order_and_leave_when_they_are_dropped():
    row = WaitingRow()
    made = [asked(f"r{n}", 5, Promise(first_token_in_s=-1.0)) for n in range(5)]
    for request in made:
        row.add(request)
    assert row.first(lambda _: False) is made[0]
    row.remove(made[0])
    row.remove(made[3])
    order: list[Request] = []
    while row:
        order.append(row.first(lambda _: False))
        row.serve(order[-1])
    assert order == [made[1], made[2], made[4]]


@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_whatever_is_promised(seed: int):
    chance = random.Random(seed)
    limits = BatchLimits(
        step_tokens=chance.choice((64, 512)),
        chunk_tokens=chance.choice((None, 16)),
        running=chance.choice((4, 32)),
        keep_promises=True,
    )
    stage = PaperStage(200, limits)
    trained(stage.scheduler.promises.pace)
    left, steps = 60, 0
    while left or stage.scheduler.has_work:
        if left and chance.random() < 0.5:
            left -= 1
            promise = Promise(
                first_token_in_s=chance.choice((None, -1.0, 0.001, 5.0)),
                token_s=chance.choice((None, 0.0001, 0.004, 0.2)),
            )
            stage.submit(
                [100 * left + place for place in range(chance.randrange(1, 90))],
                chance.randrange(1, 40),
                promise=promise,
            )
        stage.step()
        steps += 1
        assert steps < 20_000
    assert stage.scheduler.kv_used_tokens == 0
