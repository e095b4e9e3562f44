"""Restored graphs of prompts, without a device: behind which others they come, and what waits for
them.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from restored_rig import DEADLINE_S, WHOLE, RestoredRig, plan_of, settled, unreadable

from pilotlight.engine.cuda.graphs import Kind
from pilotlight.engine.errors import RestoreFailed
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.materialized import Trial
from pilotlight.policy.model import Stage


@pytest.fixture
def prompts() -> Iterator[RestoredRig]:
    made = RestoredRig((1, 2), prompts=(16, 64))
    yield made
    made.end()


def test_prompts_come_behind_decode_steps_and_are_proved_as_they_are(prompts: RestoredRig) -> None:
    plan = prompts.begin()
    prompts.device.go()
    settled(prompts)
    assert prompts.device.built == [1, 2, prompt_size(16), prompt_size(64)]
    assert prompts.supply(64) is None, "64 requests are no prompt of 64 tokens"
    assert prompts.supply(64, Stage(0, 2), prompt=True) is None
    step = prompts.supply(64, prompt=True)
    assert step is not None
    assert prompts.device.launched == [prompt_size(64), 1], "its trial, and the next step's"
    assert (plan.news.ready, plan.news.proved) == (4, 1)
    assert prompts.supply(1) is not None
    assert prompts.device.launched == [prompt_size(64), 1], "which lies between no two tokens"
    assert plan.news.proved == 2
    prompts.graph_set.uses = {Kind(WHOLE, 64, prompt=True): 5, Kind(WHOLE, 2): 7}
    assert plan.uses == {2: 7, prompt_size(64): 5}


def test_what_a_request_that_has_come_needs_goes_first(prompts: RestoredRig) -> None:
    plan = prompts.begin(before=lambda: plan_of(prompts).expect(40))
    assert prompts.told_before is False, "there may be none yet"
    prompts.device.go()
    settled(prompts)
    assert prompts.device.built == [prompt_size(64), 1, 2, prompt_size(16)]
    assert plan.expect(33), "its prompt has a graph"
    assert not plan.expect(100), "that is longer than any"
    assert not plan.expect(1)


def test_the_others_wait_until_what_the_request_needs_has_run() -> None:
    rig = RestoredRig((1, 2), prompts=(16, 64), rest_s=DEADLINE_S)
    plan = rig.begin(before=lambda: plan_of(rig).expect(40))
    rig.device.go()
    assert rig.supply(64, prompt=True) is not None
    assert rig.supply(1) is not None
    settled(rig)
    assert rig.device.built == [prompt_size(64), 1, 2, prompt_size(16)]
    assert rig.device.when[2] == [prompt_size(64), 1], "both had been proved"
    assert plan.news.ready == 4
    rig.end()


def test_closing_does_not_wait_for_a_request() -> None:
    rig = RestoredRig((1, 2), prompts=(16,), rest_s=DEADLINE_S)
    rig.begin(before=lambda: plan_of(rig).expect(16))
    rig.device.go()
    assert rig.supply(16, prompt=True) is not None
    plan_of(rig).close()
    assert 2 not in rig.device.built
    rig.end()


def test_a_prompt_is_not_waited_for_once_graphs_are_refused(prompts: RestoredRig) -> None:
    unreadable(prompts)
    plan = prompts.begin()
    settled(prompts)
    assert not plan.expect(40)


def test_a_prompt_that_gives_other_bits_for_its_trial_ends_the_process(
    prompts: RestoredRig,
) -> None:
    wrong = (prompts.layout.prompts[0], Trial(rows=64, digest="0" * 64))
    prompts.layout = replace(prompts.layout, prompts=wrong)
    prompts.begin()
    prompts.device.go()
    assert prompts.supply(16, prompt=True) is not None
    with pytest.raises(RestoreFailed, match="prompts of 64 rows gave"):
        prompts.supply(64, prompt=True)


def test_an_archive_may_have_more_than_its_layout_names(prompts: RestoredRig) -> None:
    prompts.layout = replace(prompts.layout, prompts=())
    plan = prompts.begin()
    prompts.device.go()
    settled(prompts)
    assert (prompts.device.built, plan.news.refused) == ([1, 2], "")
    assert prompts.supply(16, prompt=True) is None
    assert prompts.capture.asked == [Kind(WHOLE, 16, prompt=True)]
    assert not plan.expect(16)
