"""Groups that end as one worker, or as one worker each, at instants that hypothesis picks: tokens
are those of one engine with the whole model, in float32.

``test_shorter`` has the third way, to fewer stages; ``test_growing`` and its like have each step of
a way alone.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import INSTANCE, MemoryPipeline, cuts, staged

from pilotlight.engine import kv_moves
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import growth, lead
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.request import FinishReason, RequestKey, Sampling

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4}
KV_TOKENS = 400
REQUESTS = 8
CANCELLED = "3"
STAGES = [cuts(4, 2), cuts(4, 4), [Stage(0, 1), Stage(1, 3), Stage(3, 4)]]
LIMITS = BatchLimits(step_tokens=40, running=5)
MOST_STEPS = 25
"""Between two things that are done to an engine."""


@pytest.fixture(autouse=True, scope="module")
def no_waiting():
    """All stages take turns in one thread; a copy takes many answers, each of one layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lead, "LOOK_OUT_S", 0.0)
        patch.setattr(growth, "COPY_BYTES", 3 * 2 * 16 * 2 * 12 * 4)
        patch.setattr(kv_moves, "READ_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("llama", 2, Dtype.FLOAT32)


@dataclass(frozen=True)
class Asked:
    """What a client asks for."""

    prompt: list[int]
    sampling: dict


@pytest.fixture(scope="module")
def asks(prompts):
    """By name; some share a prefix of several blocks."""
    return {
        str(index): Asked(
            [*prompts[2], *prompts[index % 4]] if index % 2 else prompts[index % 4],
            {"seed": index % 3, **SAMPLED, "max_tokens": 24 + index},
        )
        for index in range(REQUESTS)
    }


@pytest.fixture(scope="module")
def one_worker(model, asks, driver):
    """What one engine says that has all layers, of each request alone."""
    said = {}
    for name, asked in asks.items():
        alone = driver()
        alone.load(model)
        alone.add(name, asked.prompt, **asked.sampling)
        said |= alone.finish()
    return said


@dataclass
class Switching:
    """A group that answers, while its stages get other layers."""

    pipeline: MemoryPipeline
    model: object
    asks: dict
    waiting: list = field(default_factory=list)
    """Requests that are still to come, the last one first."""

    def __post_init__(self):
        chance = self.pipeline.chance
        self.waiting = sorted(self.asks, key=lambda name: chance.random())

    @property
    def outputs(self):
        return self.pipeline.lead.outputs

    def disturb(self):
        """A request comes, or is cancelled."""
        chance = self.pipeline.chance
        if self.waiting and chance.random() < 0.2:
            self.arrive()
        ask = self.outputs.get(CANCELLED)
        if ask is not None and ask.finish is None and chance.random() < 0.02:
            self.pipeline.lead.engine.abort(RequestId(CANCELLED), 1)

    def arrive(self):
        name = self.waiting.pop()
        self.pipeline.lead.add(name, self.asks[name].prompt, **self.asks[name].sampling)

    def steps(self, count):
        for _ in range(count):
            self.disturb()
            self.pipeline.step()

    def steps_until(self, done):
        for _ in range(20_000):
            if done():
                return
            self.steps(1)
        raise AssertionError("it does not come to an end")

    def deeds(self, index, stage):
        """Its extension and its parts, in their order."""
        engine, spec = self.pipeline.drivers[index].engine, self.model.spec
        held = engine._stages[INSTANCE].stage
        device_bytes = parameter_bytes(decoder_of(spec), stage, spec.dtype)
        device_bytes += KV_TOKENS * spec.kv_bytes_per_token(stage, spec.dtype)
        missing = set(spec.parts_of(stage)) - set(spec.parts_of(held))
        return [
            lambda: engine.extend(INSTANCE, stage, device_bytes),
            *(
                lambda part=part: engine.place_part(INSTANCE, part, self.model.parts[part])
                for part in sorted(missing)
            ),
        ]

    def stage_of(self, index):
        return self.pipeline.drivers[index].engine._stages[INSTANCE].stage

    @property
    def over(self):
        """No stage is in the pipeline any more."""
        stages = [runs.engine._stages[INSTANCE] for runs in self.pipeline.drivers]
        return all(stage.pipeline is None for stage in stages)


def assert_same(outputs, one_worker):
    """Every token, once; of what was cancelled, as many as came."""
    assert outputs.keys() == one_worker.keys()
    for name, output in outputs.items():
        if output.finish is FinishReason.CANCELLED:
            assert name == CANCELLED
            assert output.token_ids == one_worker[name][: len(output.token_ids)]
        else:
            assert output.token_ids == one_worker[name]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_tokens_are_one_workers_whenever_a_group_becomes_one(
    data, seed, model, asks, one_worker, driver
):
    """The lead takes all layers over, at once or in some goes, while requests come, go, share
    prefixes and are preempted.
    """
    stages = data.draw(st.sampled_from(STAGES))
    between = st.integers(0, MOST_STEPS)
    group = staged(driver, model, stages, seed=seed, limits=LIMITS, kv_tokens=KV_TOKENS)
    switching = Switching(group, model, asks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "SETTLING_AT_ONCE", data.draw(st.sampled_from([1, 8])))
        stop = stages[0].stop
        while stop < 4:
            stop = data.draw(st.integers(stop + 1, 4), label="layers that the lead is to have")
            for deed in switching.deeds(0, Stage(0, stop)):
                switching.steps(data.draw(between))
                deed()
            switching.steps_until(lambda stop=stop: switching.stage_of(0) == Stage(0, stop))
        switching.steps_until(lambda: switching.over)
    assert not group.lost
    for runs in group.drivers[1:]:
        runs.engine.unload(INSTANCE)
        assert runs.engine.backed_bytes == 0
    while switching.waiting:
        switching.arrive()
    group.finish()
    assert_same(group.lead.outputs, one_worker)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_tokens_are_one_workers_whenever_a_group_becomes_several(
    data, seed, model, asks, one_worker, driver
):
    """Each stage gets all layers, in any order among each other; then requests of the lead go on at
    the others, with the KV that they ask the lead for, or without, or stay.
    """
    stages = data.draw(st.sampled_from(STAGES))
    between = st.integers(0, MOST_STEPS)
    group = staged(driver, model, stages, seed=seed, limits=LIMITS, kv_tokens=KV_TOKENS)
    switching = Switching(group, model, asks)
    whole = model.spec.whole
    deeds = [switching.deeds(index, whole) for index in range(len(stages))]
    while left := [index for index, mine in enumerate(deeds) if mine]:
        index = data.draw(st.sampled_from(left), label="stage that gets something")
        switching.steps(data.draw(between))
        deeds[index].pop(0)()
    switching.steps_until(
        lambda: switching.over and all(switching.stage_of(at) == whole for at in range(len(stages)))
    )
    assert not group.lost
    others = group.drivers[1:]
    for number, runs in enumerate(others):
        runs.engine.rename(INSTANCE, InstanceId(f"other{number}"))
        runs.capacity_tokens = runs.engine.kv_capacity_tokens(InstanceId(f"other{number}"))
    for name in [name for name, one in switching.outputs.items() if one.finish is None]:
        switching.steps(data.draw(between))
        goes_to = data.draw(st.integers(-1, len(others) - 1))
        if goes_to >= 0 and switching.outputs[name].finish is None:
            with_kv = data.draw(st.booleans())
            move(switching, name, others[goes_to], InstanceId(f"other{goes_to}"), with_kv=with_kv)
    while switching.waiting:
        switching.arrive()
    outputs = {}
    for runs in group.drivers:
        runs.finish()
        outputs |= runs.outputs
    assert_same(outputs, one_worker)


def move(switching, name, runs, instance, *, with_kv):
    """As when a gateway has a request go on elsewhere: it leaves, and comes with what it has said,
    and with the KV of which there is some.
    """
    lead_of, output = switching.pipeline.lead, switching.outputs[name]
    lead_of.engine.abort(RequestId(name), 1)
    said = list(output.token_ids)
    while output.finish is None:
        lead_of.step()
    del lead_of.outputs[name]
    output.token_ids, output.finish = said, None
    asked = switching.asks[name]
    pieces, layer = [], 0
    token_ids = [*asked.prompt, *said]
    while with_kv and (
        found := lead_of.engine.shared_kv(INSTANCE, token_ids, layer, on_device=False)
    ):
        layers, tensor = found
        key = RequestKey(RequestId(name), 2)
        pieces.append(KvPiece(key=key, layers=layers, start=0, keys_and_values=tensor))
        layer = layers.stop
    sampling = Sampling(**asked.sampling)
    runs.engine.add(RequestId(name), 2, instance, asked.prompt, said, sampling, pieces=pieces)
    runs.outputs[name] = output
