"""What ``make bench-promises`` puts between clients and its instance."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def test_a_lone_request_passes_a_gateway_at_once():
    from promises_gateways import REQUEST_S, UNLIKE, WAY_S, Asked, Gateways

    gateways = Gateways(random.Random(1))
    assert gateways.begins_s is None
    gateways.ask(2.0, Asked(0.0, 5, 7))
    assert gateways.begins_s == pytest.approx(2.0 + WAY_S)
    assert not list(gateways.handed(2.0))
    (one,) = gateways.handed(2.0 + 2 * WAY_S)
    took_s = one.at_s - one.sent_s - 2 * WAY_S
    assert UNLIKE[0] * REQUEST_S <= took_s <= UNLIKE[1] * REQUEST_S
    assert (one.sent_s, one.known_s) == (2.0, pytest.approx(2.0 + WAY_S))


def test_those_that_wait_together_leave_when_nearly_all_are_done():
    from promises_gateways import APART_S, GATEWAYS, REQUEST_S, UNLIKE, Asked, Gateways

    gateways = Gateways(random.Random(1))
    for _ in range(20 * GATEWAYS):
        gateways.ask(0.0, Asked(0.0, 5, 7))
    handed = sorted(gateways.handed(1.0))
    assert sorted(one.place for one in handed) == list(range(1, 20 * GATEWAYS + 1))
    for gateway in range(GATEWAYS):
        at_s = [one.at_s for one in handed if one.gateway == gateway]
        assert len(at_s) == 20
        assert at_s[0] >= 20 * (REQUEST_S - APART_S[1]) * UNLIKE[0]
        assert at_s[-1] - at_s[0] <= 19 * APART_S[1] + 1e-9


def test_a_request_that_comes_meanwhile_is_taken_up_afterwards():
    from promises_gateways import APART_S, WAY_S, Asked, Gateways

    gateways = Gateways(random.Random(1))
    for _ in range(9):
        gateways.ask(0.0, Asked(0.0, 5, 7), gateway=0)
    gateways.ask(0.005, Asked(0.0, 5, 7), gateway=0)
    first = list(gateways.handed(WAY_S))
    assert len(first) == 9
    (late,) = gateways.handed(1.0)
    assert late.known_s == pytest.approx(first[-1].at_s - WAY_S)
    assert late.at_s > first[-1].at_s + APART_S[0]


def test_tokens_of_a_step_are_told_one_after_the_other():
    from promises_gateways import END_S, FIRST_S, TOKEN_S, WAY_S, Gateways

    gateways = Gateways(random.Random(1))
    gateways.receive(1.0)
    told_s = [
        gateways.tell(gateway, first=first, last=last)
        for gateway, first, last in ((0, False, False), (1, True, False), (0, False, True))
    ]
    extra_s = [TOKEN_S, TOKEN_S + FIRST_S, 2 * TOKEN_S + END_S]
    assert told_s == pytest.approx([1.0 + 2 * WAY_S + each_s for each_s in extra_s])


def served(ending_s: float, clients: int, tokens: tuple[int, int], turns: int):
    from promises import KEPT, NO_SLO
    from promises_device import DEVICES, Served
    from promises_gateways import Asked

    limits = replace(KEPT, ending_s=ending_s)
    asked = [Asked(0.0, *tokens)] * (clients * turns)
    return Served(DEVICES["4B"], limits, 3).in_turn(asked, clients, NO_SLO)


def test_waves_are_answered_whole_and_the_same_each_time():
    answers = served(0.1, 36, (40, 60), 2)
    assert [one.output_tokens for one in answers] == [60] * 72
    assert all(min(one.gaps_s) > 0 for one in answers)
    assert [one.gaps_s for one in answers] == [one.gaps_s for one in served(0.1, 36, (40, 60), 2)]


def test_to_wait_for_a_batchs_end_stretches_fewer_gaps():
    from served_gpu_load import figures

    def stretched(ending_s: float) -> int:
        answers = served(ending_s, 64, (161, 128), 3)
        usual_s = figures(answers)["itl_ms_p50"] / 1e3
        return sum(gap_s > 2 * usual_s for one in answers for gap_s in one.gaps_s)

    assert stretched(0.1) < stretched(0.0)
