"""The fluid engine against one that counts every step."""

import pytest

from pilotlight.policy.cost import EngineSpeed
from pilotlight.policy.ids import ModelName
from pilotlight.sim.cluster.engine import Engine, Pace, Request
from pilotlight.sim.cluster.events import Events

PACE = Pace(
    speed=EngineSpeed(load_bytes_per_s=0.0, prefill_tokens_per_s=10_000.0, decode_step_s=0.02),
    decode_more_s=0.002,
)


def _run(*requests: Request, until_s: float = 1000.0) -> None:
    events = Events()
    engine = Engine(events=events, pace=PACE, first=lambda _: None, ended=lambda _: None)
    for one in requests:
        events.at(one.arrived_s, lambda one=one: engine.submit(one))
    while events.step(until_s):
        pass


def test_a_request_alone() -> None:
    """Its prompt beside no other, then a step for each token."""
    one = Request(ModelName("m"), 1.0, 400, 11)
    _run(one)
    assert one.ttft_s == pytest.approx(0.02 + 0.04)
    assert one.tpot_s == pytest.approx(0.02)


def test_prompts_slow_those_that_decode() -> None:
    """While the second's prompt of one chunk is computed, the first gets one token."""
    one, other = Request(ModelName("m"), 0.0, 100, 1001), Request(ModelName("m"), 10.0, 500, 2)
    _run(one, other)
    assert other.ttft_s == pytest.approx(0.02 + 0.05)
    steps_s = (10.0 - 0.03) + 0.07 + 0.022
    tokens = (10.0 - 0.03) / 0.02 + 1 + 1
    assert one.finished_s == pytest.approx(0.03 + steps_s + (1000 - tokens) * 0.02)


def test_many_together_as_step_by_step() -> None:
    """Requests that come together end when steps of a shrinking batch say so."""
    requests = [Request(ModelName("m"), 0.0, 1, 10 * (number + 1)) for number in range(4)]
    _run(*requests)
    # All prompts are one token: their steps are done one after the other, with those before beside.
    now_s, decoded = 0.0, [0] * 4
    for number in range(4):
        now_s += PACE.step_s(number, 1)
        for before in range(number):
            decoded[before] += 1
        decoded[number] = 1
        assert requests[number].first_token_s == pytest.approx(now_s)
    left = {number: 10 * (number + 1) - decoded[number] for number in range(4)}
    while left:
        now_s += PACE.step_s(len(left))
        left = {number: tokens - 1 for number, tokens in left.items()}
        for number in [one for one, tokens in left.items() if tokens == 0]:
            assert requests[number].finished_s == pytest.approx(now_s)
            del left[number]


def test_what_is_given_up_goes_on_with_the_tokens_that_it_has() -> None:
    """A request that moves has its first token once, and its prompt grows by what it has."""
    events = Events()
    firsts: list[Request] = []
    one = Request(ModelName("m"), 0.0, 100, 101)
    engine = Engine(events=events, pace=PACE, first=firsts.append, ended=lambda _: None)
    engine.submit(one)
    while events.step(0.03 + 0.02 * 40.5):
        pass
    events.now_s = 0.03 + 0.02 * 40.5
    (moved,) = engine.stop()
    assert (moved.left_tokens, moved.prompt_tokens) == (60, 141)
    other = Engine(events=events, pace=PACE, first=firsts.append, ended=lambda _: None)
    other.submit(moved)
    while events.step(100.0):
        pass
    assert firsts == [one]
    assert one.finished_s == pytest.approx(0.84 + 0.02 + 0.0141 + 59 * 0.02)
