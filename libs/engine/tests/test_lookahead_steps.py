"""One launched step: who may be in the one that follows before its tokens are known, and when it is
planned.
"""

import pytest
from torch import Tensor

from pilotlight.engine.core.batch import Batch, Plan, Segment
from pilotlight.engine.core.pace import PLANNING_S, UNSURE_SHARE, Pace
from pilotlight.engine.core.request import Request
from pilotlight.engine.device.sampler import NotSampled, SampledToken
from pilotlight.engine.lookahead import (
    LOOK_S,
    LaunchedStep,
    may_follow,
)
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import RequestKey, Sampling


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "top_k": 5}, False),
        ({"prompt_logprobs": 2}, False),
    ],
    ids=["greedy", "noisy", "top_k", "scored"],
)
def test_who_may_run_before_tokens_are_known(changes: dict[str, object], may: bool) -> None:
    sampling = Sampling(**{"seed": 0, "max_tokens": 3, "temperature": 0.0, **changes})
    request = Request(RequestKey(RequestId("r"), 1), [1, 2], (), sampling, 1000)
    assert may_follow(request) == may


class Coming:
    """Tokens that are there when they have been asked for so often."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    @property
    def there(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    @property
    def inputs(self) -> Tensor:
        raise NotImplementedError

    def wait(self) -> list[SampledToken | NotSampled]:
        return []


class Paced(Pace):
    """A step with prompts takes 0.1 s; no other one is known."""

    def step_s(self, batch: Batch) -> float | None:
        return 0.1 if batch.num_tokens > 2 else None


def rest_s(tokens: Coming, count: int, now_s: float) -> float:
    """Of a step that began at 10.0."""
    plan = Plan((), Batch((Segment(0, count, (0,), True),)), 0, 0, 0)
    return LaunchedStep(plan, (), tokens).begun(10.0, Paced()).rest_s(now_s)


def test_the_host_rests_until_shortly_before_a_step_ends() -> None:
    assert rest_s(Coming(9), 16, 10.0) == LOOK_S
    last_s = 10.1 - UNSURE_SHARE * 0.1 - PLANNING_S
    assert rest_s(Coming(9), 16, last_s - 0.001) == pytest.approx(0.001)
    assert rest_s(Coming(9), 16, last_s) == 0.0
    assert rest_s(Coming(9), 1, 10.0) == 0.0, "who knows when it ends"
    soon = Coming(2)
    assert [rest_s(soon, 16, 10.0) for _ in range(3)] == [LOOK_S, LOOK_S, 0.0]
