"""Steps that keep what requests are promised."""

import itertools
import random
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_stage import PaperStage

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.core.pace import (
    LEAST_PROMPT_TOKENS,
    LEAST_STREAMS,
    SAMPLES,
    Pace,
    prompt_work,
)
from pilotlight.engine.core.promises import (
    DELIVERY_S,
    LEAST_TOKENS,
    TOKEN_SHARE,
    WORTH_TOKENS,
    Promises,
    most_in_time,
)
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
    return LEAST_S + STREAM_S * streams + TOKEN_S * prompt_work(0, prompt_tokens)


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


def stream(name: str, prompt_tokens: int, first_s: float, token_s: float | None) -> Request:
    """Has had its first token, and 20 more."""
    made = asked(name, prompt_tokens, Promise(token_s=token_s) if token_s else None)
    made.first_s = first_s
    if token_s:
        made.token_ids += range(20)
    made.computed = len(made.token_ids) - 1
    return made


def test_the_pace_is_what_steps_took():
    pace = Pace()
    assert pace.streams_s([9] * 4) is None
    assert pace.prompt_token_s is None
    trained(pace)
    assert pace.streams_s([9]) == pytest.approx(took_s(1, 0), rel=0.06)
    assert pace.streams_s([9] * 128) == pytest.approx(took_s(128, 0), rel=0.06)
    assert pace.prompt_token_s == pytest.approx(TOKEN_S, rel=0.06)


def test_streams_cost_more_with_longer_contexts_and_prompts_with_their_length():
    pace = Pace()
    trained(pace)
    short, long = pace.streams_s([9] * 32), pace.streams_s([2000] * 32)
    assert short is not None
    assert long is not None
    assert long > 4 * short
    assert prompt_work(0, 2000) + prompt_work(2000, 2000) == pytest.approx(prompt_work(0, 4000))
    assert prompt_work(0, 4000) > 2 * prompt_work(0, 2000)


def test_one_slow_step_says_nothing_and_few_tokens_say_nothing():
    pace = Pace()
    now_s = trained(pace)
    before = pace.streams_s([9] * 64), pace.prompt_token_s
    pace.ran(batch_of(64, 0), now_s, now_s + 3.0)
    pace.ran(batch_of(64, 2048), now_s + 3.0, now_s + 9.0)
    pace.ran(batch_of(LEAST_STREAMS - 1, 0), now_s + 9.0, now_s + 9.1)
    pace.ran(batch_of(64, LEAST_PROMPT_TOKENS - 1), now_s + 9.1, now_s + 9.5)
    assert pace.streams_s([9] * 64) == pytest.approx(before[0], rel=0.05)
    assert pace.prompt_token_s == pytest.approx(before[1], rel=0.05)


def test_streams_waited_for_what_ran_between_their_steps():
    """Another model's step, say: the time between two tokens is what is promised."""
    pace, now_s = Pace(), 0.0
    for _ in range(SAMPLES + 1):
        pace.ran(batch_of(16, 0), now_s + 0.006, now_s + 0.010)
        now_s += 0.010
    assert pace.streams_s([9] * 16) == pytest.approx(0.010, rel=0.01)


def test_what_a_step_takes_is_known_once_streams_and_prompts_have_run():
    pace = Pace()
    prompts = Batch((Segment(9, 1, (0,), True), Segment(0, 1000, (1,), True)))
    assert pace.step_s(prompts) is None
    trained(pace)
    streams = Batch(tuple(Segment(9, 1, (0,), True) for _ in range(16)))
    assert pace.step_s(streams) == pytest.approx(pace.streams_s([10] * 16))
    assert pace.step_s(prompts) == pytest.approx(took_s(1, 1000), rel=0.1)


def test_a_first_token_is_in_time_while_the_prompt_can_run_before_it_is_due():
    promises = Promises(kept=True)
    trained(promises.pace)
    request = asked("r", 2000, Promise(first_token_in_s=0.2), now_s=10.0)
    last_s = 10.2 - DELIVERY_S - prompt_work(0, 2000) * TOKEN_S
    assert promises.in_time(request, last_s - 0.002)
    assert not promises.in_time(request, last_s + 0.002)
    assert Promises(kept=False).in_time(request, 99.0)
    assert promises.in_time(asked("free", 2000, None), 99.0)


def test_no_more_run_than_leave_time_for_prompts():
    """Half of 20 ms holds (10 ms - 2 ms) / 0.1 ms streams."""
    promises = Promises(kept=True)
    trained(promises.pace)
    request = asked("r", 9, Promise(token_s=0.020))

    def running(count: int) -> list[Request]:
        return [stream(f"s{place}", 9, 0.0, None) for place in range(count)]

    assert not promises.crowded(running(73), request, 0.0)
    assert promises.crowded(running(83), request, 0.0)
    assert not promises.crowded([], request, 0.0)
    assert not promises.crowded(running(83), asked("free", 10, None), 0.0)
    assert not promises.crowded(running(83), asked("no", 10, Promise(token_s=0.003)), 0.0)
    assert not Promises(kept=False).crowded(running(200), request, 0.0)


def test_none_joins_a_step_that_would_then_be_late_for_another():
    promises = Promises(kept=True)
    now_s = trained(promises.pace)
    late_s = took_s(0, 4000) + DELIVERY_S
    long = asked("long", 4000, Promise(first_token_in_s=0.2), now_s=now_s)
    for left_s, waits in ((late_s + 0.001, True), (late_s + 0.1, False), (0.001, False)):
        first = asked("first", 2000, Promise(first_token_in_s=left_s), now_s=now_s)
        assert promises.crowded([first], long, now_s) == waits


def test_a_prompt_takes_as_long_as_the_stream_with_the_least_lead_can_wait():
    promises = Promises(kept=True)
    now_s = trained(promises.pace)
    streams = [asked(f"s{n}", 10, Promise(token_s=0.020)) for n in range(4)]
    assert promises.prompt_tokens(streams, 9000, now_s) is None, "none of them had a token"
    streams = [stream(f"s{n}", 10, now_s, 0.020) for n in range(4)]

    def room(lead_s: float, streams: int) -> object:
        return pytest.approx((lead_s - took_s(streams, 0)) / TOKEN_S, rel=0.08)

    # 20 tokens are there, and 20 more are its grace: 0.8 s are due to them, and 0.72 are aimed at.
    ahead = promises.prompt_tokens(streams, 9000, now_s + 0.5)
    assert ahead == room(TOKEN_SHARE * 0.8 - 0.5, 4)
    streams[2].first_s = now_s - 0.1
    assert promises.prompt_tokens(streams, 9000, now_s + 0.5) == room(TOKEN_SHARE * 0.8 - 0.6, 4)
    streams[2].first_s = now_s - 0.5
    assert promises.prompt_tokens(streams, 9000, now_s + 0.5) == ahead, "late already"
    one_more = promises.prompt_tokens(streams, 9000, now_s + 0.5, under_way=1)
    assert one_more == room(TOKEN_SHARE * 0.82 - 0.5, 4), "it will be there by then"
    hopeless = [stream("hopeless", 10, now_s + 0.5, 0.0001)]
    assert promises.prompt_tokens(hopeless, 9000, now_s + 0.5) == LEAST_TOKENS


def test_thin_slices_wait_until_there_is_room_for_one_that_is_worth_it():
    promises = Promises(kept=True)
    now_s = trained(promises.pace)
    streams = [stream(f"s{n}", 10, now_s, 0.020) for n in range(4)]
    worth_s = took_s(4, 0) + TOKEN_S * WORTH_TOKENS
    asked_s = now_s + TOKEN_SHARE * 0.8 - 0.010
    assert worth_s < TOKEN_SHARE * 0.020, "the time of a token is enough for one"
    assert promises.prompt_tokens(streams, WORTH_TOKENS, asked_s) != 0
    slow = [stream(f"t{n}", 10, now_s, 0.012) for n in range(4)]
    asked_s = now_s + TOKEN_SHARE * 0.012 * 40 - 0.001
    assert promises.prompt_tokens(slow, WORTH_TOKENS, asked_s) == 0
    assert promises.prompt_tokens(slow, 300, asked_s) == pytest.approx(
        (TOKEN_SHARE * 0.012 - took_s(4, 0)) / TOKEN_S, rel=0.08
    ), "a short prompt is worth it"
    assert promises.prompt_tokens(slow, WORTH_TOKENS, asked_s - 0.2) != 0


Job = tuple[float, float, int]


def in_time(order: Collection[Job], begin_s: float) -> int:
    ends_s, count = begin_s, 0
    for due_s, runs_s, _ in order:
        ends_s += runs_s
        count += ends_s <= due_s
    return count


JOBS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), max_size=6)


@given(JOBS, st.integers(0, 10))
def test_as_many_are_in_time_as_in_the_best_of_all_orders(pairs: list[tuple[int, int]], begin: int):
    jobs: list[Job] = [(float(due), float(runs), n) for n, (due, runs) in enumerate(pairs)]
    chosen = most_in_time(jobs, float(begin))
    kept = sorted(job for job in jobs if chosen is None or job[2] in chosen)
    most = max(in_time(order, begin) for order in itertools.permutations(jobs))
    assert in_time(kept, begin) == len(kept) == most >= in_time(jobs, begin)


def test_prompts_are_cut_beside_streams_also_while_a_first_token_is_in_danger():
    limits = BatchLimits(step_tokens=4096, chunk_tokens=100, running=64, keep_promises=True)
    for first_in_s in (5.0, 0.05):
        stage = PaperStage(1000, limits)
        stage.submit([1, 2, 3], 90)
        stage.step()
        stage.step()
        trained(stage.scheduler.promises.pace)
        stage.submit(list(range(1000)), 5, promise=Promise(first_token_in_s=first_in_s))
        assert stage.step()[1] == ("r1", 0, 143), "the first of seven pieces"


class Dues:
    """An order in which due times alone count, and the shortest is chosen."""

    def in_time(self, request: Request) -> bool:
        return request.due_s is None or request.due_s > 0

    def choice(self, timely: Collection[Request]) -> Request:
        return min(timely, key=lambda request: request.prompt_tokens)


@pytest.mark.parametrize(("tokens", "due_s"), [(5, -1.0), (500, 9.0)])
def test_who_is_late_or_left_out_is_overtaken_so_many_times_and_no_more(tokens: int, due_s: float):
    row, behind = WaitingRow(), asked("behind", tokens, Promise(first_token_in_s=due_s))
    row.add(behind)
    served: list[str] = []
    for number in range(40):
        row.add(asked(f"r{number}", 5, Promise(first_token_in_s=9.0)))
        first = row.first(Dues())
        assert row.first(Dues()) is first
        row.serve(first)
        served.append(first.key.request_id)
    assert served.index("behind") == OVERTAKEN
    assert served[:3] == ["r0", "r1", "r2"]


def test_those_that_are_late_keep_their_order_and_leave_when_they_are_dropped():
    row = WaitingRow()
    made = [asked(f"r{n}", 5, Promise(first_token_in_s=-1.0)) for n in range(5)]
    for request in made:
        row.add(request)
    assert row.first(Dues()) is made[0]
    row.remove(made[0])
    row.remove(made[3])
    order: list[Request] = []
    while row:
        order.append(row.first(Dues()))
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
