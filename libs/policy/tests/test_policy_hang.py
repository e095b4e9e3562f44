"""When an engine hangs, and when it is only slow."""

from dataclasses import replace

import pytest

from pilotlight.policy.hang import (
    Doing,
    Patience,
    Sight,
    StepTimes,
    Watched,
    allowed_s,
    hung,
    watched,
)

LOOK_S = 0.25
PATIENCE = Patience()
NOTHING = StepTimes()
STEPPING = Sight(word=1, doing=Doing.STEPPING, tokens=8)


def after(
    seconds: float, sight: Sight, times: StepTimes = NOTHING, starved_share: float = 0.0
) -> str:
    """What is said of an engine that has looked the same for so long."""
    seen = Watched()
    for look in range(int(seconds / LOOK_S) + 1):
        seen = watched(seen, replace(sight, starved_s=look * LOOK_S * starved_share), LOOK_S)
    return hung(seen, times, PATIENCE)


def known(tokens: int, *seconds: float) -> StepTimes:
    times = StepTimes()
    for one in seconds:
        times = times.after(tokens, one)
    return times


def test_a_step_hangs_when_it_takes_far_longer_than_such_steps_do() -> None:
    assert not after(7.5, STEPPING, known(8, 0.02))
    assert (
        after(8, STEPPING, known(8, 0.02))
        == "a step of 8 tokens has not ended for 8 s, where 0.02 s are usual"
    )
    assert not after(19, STEPPING, known(8, 2.0)), "ten times as long as usual"
    assert after(20, STEPPING, known(8, 2.0))
    assert not after(59, STEPPING), "of the first steps of a model nothing is known"
    assert "its model's first" in after(60, STEPPING)


def test_a_larger_step_may_take_longer() -> None:
    decodes = known(1, 0.05)
    assert decodes.expected_s(512) == pytest.approx(0.05 * 512)
    assert not after(200, replace(STEPPING, tokens=512), decodes)
    prompts = known(512, 3.0)
    assert prompts.expected_s(8) == 3.0, "no longer than a larger one"
    assert decodes.after(512, 3.0).expected_s(1024) == 6.0
    assert decodes.after(512, 3.0).expected_s(0) == 3.0, "a size that is not known is any"
    assert decodes.after(1 << 60, 9.0).expected_s(1 << 60) == 9.0


def test_what_is_known_follows_at_once_upwards_and_slowly_downwards() -> None:
    times = known(4, 0.1, 5.0)
    assert times.expected_s(4) == 5.0
    for _ in range(20):
        times = times.after(4, 0.1)
    assert 1.0 < (times.expected_s(4) or 0) < 3.0
    for _ in range(200):
        times = times.after(4, 0.1)
    assert times.expected_s(4) == pytest.approx(0.1, rel=0.1)


def test_a_stopped_process_hangs_whatever_it_does() -> None:
    for doing in Doing:
        sight = Sight(word=1, doing=doing, stopped=True)
        assert not after(7.5, sight)
        assert "stopped for 8 s" in after(8.25, sight)


def test_a_stop_that_ends_is_nobodys_fault() -> None:
    seen = Watched()
    for _ in range(10):
        for stopped, looks in ((True, 28), (False, 1)):
            for _ in range(looks):
                seen = watched(seen, replace(STEPPING, stopped=stopped), LOOK_S)
                assert not hung(seen, known(8, 0.02), PATIENCE)
    assert seen.still_s == pytest.approx(10 * LOOK_S), (
        "what it was stopped for does not count as a step's"
    )


def test_time_without_a_processor_or_with_a_disk_is_not_its_own() -> None:
    times = known(8, 0.02)
    assert not after(1000, STEPPING, times, starved_share=1.0)
    assert not after(15, STEPPING, times, starved_share=0.5)
    assert after(16.5, STEPPING, times, starved_share=0.5)
    for busy in (replace(STEPPING, on_disk=True), replace(STEPPING, computing=True)):
        assert not after(31, busy, times)
        assert after(32.25, busy, times), "and yet there is an end to it"


def test_a_wait_for_a_processor_counts_though_it_is_told_late() -> None:
    """The system adds it up when the process gets on a processor: of a second, three looks see
    nothing.
    """
    seen = Watched()
    for look in range(4000):
        seen = watched(seen, replace(STEPPING, starved_s=float(look // 4)), LOOK_S)
        assert not hung(seen, known(8, 0.02), PATIENCE)
    assert seen.still_s <= 4 * LOOK_S


def test_an_engine_that_waits_hangs_only_when_it_takes_nothing() -> None:
    waiting = Sight(word=1, doing=Doing.WAITING)
    assert not after(10_000, waiting)
    assert after(8.25, replace(waiting, handed=True)) == "it has taken no command for 8 s"


@pytest.mark.parametrize(
    ("doing", "limit_s"), [(Doing.OBEYING, 90.0), (Doing.COMPILING, 180.0), (Doing.TELLING, 300.0)]
)
def test_loading_compiling_and_telling_have_their_own_times(doing: Doing, limit_s: float) -> None:
    sight = replace(STEPPING, doing=doing)
    assert allowed_s(sight, known(8, 0.02), PATIENCE) == limit_s
    assert not after(limit_s - 1, sight, known(8, 0.02))
    assert doing.name.lower() in after(limit_s + 1, sight, known(8, 0.02))


def test_an_engine_that_goes_on_does_not_hang() -> None:
    seen = Watched()
    for word in range(10_000):
        seen = watched(seen, replace(STEPPING, word=word // 20), LOOK_S)
        assert not hung(seen, known(8, 0.02), PATIENCE)
    assert not hung(Watched(), NOTHING, PATIENCE)
