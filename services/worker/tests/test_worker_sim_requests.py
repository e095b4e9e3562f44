"""A simulated engine's sums of its requests: what is kept is what counting would give."""

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.common.messages.engine import Run
from pilotlight.policy.ids import Digest, InstanceId, ModelName, RequestId
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo
from pilotlight.policy.request import FinishReason, RequestKey, Sampling
from pilotlight.policy.testing import tiny_spec
from pilotlight.worker.engines.sim_request import SimRequest
from pilotlight.worker.engines.sim_requests import SimRequests
from pilotlight.worker.engines.sim_stage import SimStage
from pilotlight.worker.engines.sim_tokens import SimTokens

INSTANCES = (InstanceId("a"), InstanceId("b"))
AT_MOST = 4


def model() -> Model:
    spec = tiny_spec()
    return Model(
        name=ModelName("tiny"),
        uri="file:///models/tiny",
        revision=None,
        source_version="1",
        digest=Digest("a" * 64),
        text_digest=Digest("b" * 64),
        dtype=Dtype.FLOAT32,
        spec=spec,
        slo=Slo(ttft_ms=1000.0, tpot_ms=100.0),
        scaling=ScalingBounds(),
    )


class Both:
    """Requests, and a plain list of them to compare with."""

    def __init__(self, room_tokens: int) -> None:
        tiny = model()
        per_token = tiny.spec.kv_bytes_per_token(tiny.spec.whole, tiny.dtype)
        room_bytes = tiny.device_bytes(tiny.spec.whole) + room_tokens * per_token
        self.stages = {
            one: SimStage(model=tiny, stage=tiny.spec.whole, device_bytes=room_bytes, ready=True)
            for one in INSTANCES
        }
        self.requests = SimRequests(self.stages)
        self.plain: dict[RequestKey, SimRequest] = {}
        self.numbers = 0

    def add(self, number: int) -> None:
        self.numbers += 1
        run = Run(
            request_id=RequestId(f"req-{self.numbers}"),
            attempt=1,
            instance_id=INSTANCES[number % 2],
            prompt_ids=[1] * (1 + number % 7),
            output_ids=[2] * (number % 3),
            sampling=Sampling(seed=1, max_tokens=9, temperature=0.0, ignore_eos=True),
        )
        deadline_s = float(number) if number % 2 else math.inf
        request = SimRequest(run=run, position=len(run.output_ids), deadline_s=deadline_s)
        request.tokens = SimTokens.after(1, [1], 100)
        key = RequestKey(run.request_id, 1)
        self.requests.add(key, request)
        self.plain[key] = request

    def leave(self, number: int) -> None:
        if self.plain:
            key = list(self.plain)[number % len(self.plain)]
            assert self.requests.leave(key) is self.plain.pop(key)
        assert self.requests.leave(RequestKey(RequestId("other"), 1)) is None

    def load(self, number: int) -> None:
        stage = self.stages[INSTANCES[number % 2]]
        stage.ready = not stage.ready

    def step(self, number: int) -> None:
        for one in self.requests.advance(self.requests.batch(AT_MOST)):
            if one.finish is not None:
                del self.plain[RequestKey(one.request_id, one.attempt)]

    def expire(self, number: int) -> None:
        self.requests.expire(float(number))
        overdue = [key for key, one in self.plain.items() if one.deadline_s <= number]
        for key in overdue:
            del self.plain[key]
        told = [(one.request_id, one.finish) for one in self.requests.take_ended()]
        assert told == [(key.request_id, FinishReason.ERROR) for key in overdue]

    def batch(self) -> list[RequestKey]:
        """As the words of ``SimRequests.batch`` say it."""
        taken: list[RequestKey] = []
        used, full = dict.fromkeys(INSTANCES, 0), set[InstanceId]()
        for key, request in self.plain.items():
            one = request.run.instance_id
            if not self.stages[one].ready or len(taken) == AT_MOST:
                continue
            fits = used[one] + request.held_tokens <= self.stages[one].kv_capacity_tokens
            if one in full or (used[one] and not fits):
                full.add(one)
                continue
            used[one] += request.held_tokens
            taken.append(key)
        return taken

    def check(self) -> None:
        requests, plain = self.requests, self.plain.values()
        assert len(requests) == len(self.plain)
        assert all(key in requests for key in self.plain)
        assert requests.kv_used_tokens == sum(one.held_tokens for one in plain)
        ready = [one for one in plain if self.stages[one.run.instance_id].ready]
        assert requests.any_runnable == bool(ready)
        assert [key for key, _ in requests.batch(AT_MOST)] == self.batch()
        assert requests.waiting(AT_MOST) == len(self.plain) - len(self.batch())


STEPS: tuple[Callable[[Both, int], None], ...] = (
    Both.add,
    Both.add,
    Both.leave,
    Both.load,
    Both.step,
    Both.step,
    Both.expire,
)


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 50)), max_size=40),
)
def test_what_is_kept_is_what_counting_gives(
    room_tokens: int, steps: list[tuple[Callable[[Both, int], None], int]]
) -> None:
    both = Both(room_tokens)
    for step, number in steps:
        step(both, number)
        both.check()
