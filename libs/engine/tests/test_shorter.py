"""A pipeline becomes a shorter one in mid-generation: some of its stages take the layers of the
others over, and the ring closes around them.
"""

import random
from dataclasses import dataclass, field
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import INSTANCE, MemoryPipeline, connect, cuts, staged

from pilotlight.engine.channel.memory import memory_channel
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.errors import BadRequest
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import growth, lead
from pilotlight.engine.pipeline.growth import GrowthState
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Dtype, Stage
from pilotlight.policy.request import FinishReason

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.4}
KV_TOKENS = 4096
UNEVEN = [Stage(0, 1), Stage(1, 3), Stage(3, 4)]
WAYS = [
    (cuts(4, 4), {0: Stage(0, 2), 2: Stage(2, 4)}),
    (cuts(4, 4), {0: Stage(0, 2), 3: Stage(2, 4)}),
    (cuts(4, 4), {0: Stage(0, 3), 3: Stage(3, 4)}),
    (cuts(4, 4), {0: Stage(0, 1), 1: Stage(1, 4)}),
    (cuts(4, 4), {0: Stage(0, 2), 2: Stage(2, 3), 3: Stage(3, 4)}),
    (UNEVEN, {0: Stage(0, 2), 2: Stage(2, 4)}),
]
"""Stages, and what remains of them: by index, with the longer range."""


@pytest.fixture
def one_question_at_a_time(monkeypatch):
    """Else a few layers are asked for, and handed over, in one step."""
    monkeypatch.setattr(growth, "SETTLING_AT_ONCE", 1)


@pytest.fixture(autouse=True, scope="module")
def no_waiting():
    """All stages take turns in one thread, and a copy takes many answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lead, "LOOK_OUT_S", 0.0)
        patch.setattr(growth, "COPY_BYTES", 3 * 2 * 16 * 2 * 12 * 8)
        yield


@dataclass
class Shortening:
    """What is to be done to a pipeline's engines, one thing after the other."""

    pipeline: MemoryPipeline
    model: object
    remaining: dict[int, Stage]
    kv_tokens: int = KV_TOKENS
    grown: list = field(default_factory=list)
    left: list = field(default_factory=list)
    unformed: list = field(default_factory=list)

    @property
    def engines(self):
        return {index: self.pipeline.drivers[index].engine for index in self.remaining}

    @property
    def deeds(self):
        """Extensions, parts and proofs of one stage in their order; stages in any."""
        deeds = [self.connect]
        for index, stage in self.remaining.items():
            resident = self.pipeline.drivers[index].engine._stages[INSTANCE]
            if stage == resident.stage:
                continue
            held = resident.parameters.parts
            deeds.append(lambda index=index: self.extend(index))
            missing = [part for part in self.model.spec.parts_of(stage) if part not in held]
            deeds += [lambda index=index, part=part: self.place(index, part) for part in missing]
            if index:
                deeds.append(lambda index=index: self.engines[index].vouch(INSTANCE))
        return deeds

    def extend(self, index):
        spec, stage = self.model.spec, self.remaining[index]
        device_bytes = parameter_bytes(
            decoder_of(spec), stage, spec.dtype
        ) + self.kv_tokens * spec.kv_bytes_per_token(stage, spec.dtype)
        self.engines[index].extend(INSTANCE, stage, device_bytes, shorter=True)

    def place(self, index, part):
        self.engines[index].place_part(INSTANCE, part, self.model.parts[part])

    def connect(self):
        channels = [memory_channel(monotonic) for _ in self.remaining]
        for at, (index, stage) in enumerate(self.remaining.items()):
            self.engines[index].shorten(INSTANCE, stage, channels[at - 1][1], channels[at][0])
        return channels

    def step(self):
        busy = [runs for runs in self.pipeline.drivers if runs.engine.has_work]
        if busy:
            result = self.pipeline.chance.choice(busy).step()
            self.pipeline.lost.extend(result.lost)
            self.grown.extend(result.grown)
            self.left.extend(result.left)
            self.unformed.extend(result.unformed)

    def run_until(self, done, between=lambda: None):
        for _ in range(20_000):
            if done():
                return
            between()
            self.step()
        raise AssertionError("it does not come to an end")

    @property
    def over(self):
        """The ring runs, and the stages whose layers were taken are out of it."""
        gone = [
            runs.engine._stages[INSTANCE].pipeline is None
            for index, runs in enumerate(self.pipeline.drivers)
            if index not in self.remaining
        ]
        return all(gone) and all(
            engine._stages[INSTANCE].stage == self.remaining[index]
            for index, engine in self.engines.items()
        )

    def run(self, between=lambda: None):
        for deed in self.deeds:
            between()
            deed()
        self.run_until(lambda: self.over, between)

    def shorter(self):
        """The pipeline that remains; the others' memory is free."""
        assert not self.pipeline.lost
        assert not self.unformed
        for index, runs in enumerate(self.pipeline.drivers):
            if index not in self.remaining:
                runs.engine.unload(INSTANCE)
                assert runs.engine.backed_bytes == 0
        drivers = [self.pipeline.drivers[index] for index in self.remaining]
        return MemoryPipeline(drivers, self.pipeline.chance)


def some_tokens(pipeline, name, count):
    wanted = len(pipeline.lead.outputs[name].token_ids) + count
    pipeline.run_until(lambda: len(pipeline.lead.outputs[name].token_ids) >= wanted)


@pytest.mark.parametrize(
    ("kind", "stages", "remaining"),
    [
        *(("llama", *way) for way in WAYS),
        *((kind, *WAYS[0]) for kind in ("llama-tied", "gemma3", "qwen3-moe")),
    ],
)
def test_a_pipeline_becomes_shorter_while_it_generates(
    kind, stages, remaining, checkpoint, driver, prompts
):
    model = checkpoint(kind, 1)
    pipeline = staged(driver, model, stages, limits=BatchLimits(step_tokens=24, running=24))
    for index, prompt in enumerate(prompts):
        pipeline.lead.add(str(index), prompt, max_tokens=120)
    some_tokens(pipeline, "2", 5)
    shortening = Shortening(pipeline, model, remaining)
    shortening.run()
    assert len(shortening.left) == len(stages) - len(remaining)
    assert (INSTANCE, remaining[0]) in [(one.instance_id, one.stage) for one in shortening.grown]
    assert all(output.finish is None for output in pipeline.lead.outputs.values())
    shorter = shortening.shorter()
    some_tokens(shorter, "2", 5)
    shorter.lead.add("late", prompts[0], max_tokens=20)
    outputs = shorter.finish()
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)] == model.would_say(prompt, outputs[str(index)])
    assert outputs["late"] == model.greedy(prompts[0], 20)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_tokens_are_the_same_at_every_instant_of_switching(data, seed, checkpoint, driver, prompts):
    """In float32. Requests come, go, share prefixes and are preempted meanwhile."""
    model, chance = checkpoint("llama", 2, Dtype.FLOAT32), random.Random(seed)
    settings_of = {
        str(index): {"seed": index % 3, **SAMPLED, "max_tokens": 24 + index} for index in range(8)
    }
    prompt_of = {
        name: [*prompts[2], *prompts[int(name) % 4]] if int(name) % 2 else prompts[int(name) % 4]
        for name in settings_of
    }
    stages, remaining = data.draw(st.sampled_from(WAYS))
    limits = BatchLimits(step_tokens=40, running=5)
    pipeline = staged(driver, model, stages, seed=seed, limits=limits, kv_tokens=400)
    waiting, cancelled = sorted(settings_of, key=lambda name: chance.random()), {"3"}

    def disturb():
        if waiting and chance.random() < 0.2:
            name = waiting.pop()
            pipeline.lead.add(name, prompt_of[name], **settings_of[name])
        running = {name for name, one in pipeline.lead.outputs.items() if one.finish is None}
        if cancelled & running and chance.random() < 0.02:
            pipeline.lead.engine.abort(RequestId("3"), 1)

    shortening = Shortening(pipeline, model, remaining, kv_tokens=400)
    for deed in shortening.deeds:
        for _ in range(data.draw(st.integers(0, 25))):
            disturb()
            shortening.step()
        deed()
    shortening.run_until(lambda: shortening.over, disturb)
    shorter = shortening.shorter()
    while waiting:
        disturb()
    outputs = shorter.finish()
    for name, sampling in settings_of.items():
        expected = expected_of(driver, model, name, prompt_of[name], sampling)
        if shorter.lead.outputs[name].finish is FinishReason.CANCELLED:
            expected = expected[: len(outputs[name])]
        assert outputs[name] == expected


KNOWN: dict[str, list[int]] = {}


def expected_of(driver, model, name, prompt, sampling):
    """What one engine alone says."""
    if name not in KNOWN:
        alone = driver()
        alone.load(model)
        alone.add(name, prompt, **sampling)
        KNOWN.update(alone.finish())
    return KNOWN[name]


def test_what_was_computed_is_not_computed_again(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 4))
    pipeline.lead.add("a", prompts[2], max_tokens=60)
    some_tokens(pipeline, "a", 5)
    shortening = Shortening(pipeline, model, {0: Stage(0, 2), 2: Stage(2, 4)})
    shortening.run()
    shorter = shortening.shorter()
    batch_tokens, said = 0, len(shorter.lead.outputs["a"].token_ids)
    while len(shorter.lead.outputs["a"].token_ids) < said + 5:
        busy = [runs for runs in shorter.drivers if runs.engine.has_work]
        batch_tokens += shorter.chance.choice(busy).step().batch_tokens
    assert batch_tokens <= 7
    assert shorter.finish()["a"] == model.greedy(prompts[2], 60)


def test_nothing_changes_before_every_stage_has_parts_that_were_whole(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 4))
    pipeline.lead.add("a", prompts[2], max_tokens=150)
    shortening = Shortening(pipeline, model, {0: Stage(0, 2), 2: Stage(2, 4)})
    for deed in shortening.deeds[:-1]:
        deed()
        some_tokens(pipeline, "a", 10)
    assert [runs.engine._stages[INSTANCE].stage for runs in pipeline.drivers] == cuts(4, 4)
    pipeline.drivers[2].engine.vouch(INSTANCE)
    tokens_in: dict[GrowthState, int] = {}
    lead_of = pipeline.lead.engine._stages[INSTANCE]
    while lead_of.stage != Stage(0, 2):
        growing = lead_of.pipeline._growth
        before = len(pipeline.lead.outputs["a"].token_ids)
        shortening.step()
        if growing is not None:
            said = len(pipeline.lead.outputs["a"].token_ids) - before
            tokens_in[growing.state] = tokens_in.get(growing.state, 0) + said
    assert tokens_in[GrowthState.COPYING] >= 2
    assert tokens_in.get(GrowthState.HANDING_OVER, 0) <= 2, "those under way"
    shortening.run_until(lambda: shortening.over)
    assert shortening.shorter().finish()["a"] == model.greedy(prompts[2], 150)


def test_a_lead_that_waits_for_others_can_be_called_off(checkpoint, driver, prompts):
    """It has all of its parts by then; the pipeline goes on as it was."""
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 4))
    pipeline.lead.add("a", prompts[2], max_tokens=150)
    backed_bytes = pipeline.lead.engine.backed_bytes
    shortening = Shortening(pipeline, model, {0: Stage(0, 2), 2: Stage(2, 4)})
    for deed in shortening.deeds[:-1]:
        deed()
    some_tokens(pipeline, "a", 10)
    assert pipeline.lead.engine.call_off(INSTANCE)
    assert pipeline.lead.engine.backed_bytes == backed_bytes
    shortening.run_until(lambda: bool(shortening.unformed))
    some_tokens(pipeline, "a", 5)
    shortening.unformed.clear()
    pipeline.drivers[2].engine.vouch(INSTANCE)
    again = Shortening(pipeline, model, {0: Stage(0, 2)})
    for deed in again.deeds[1:]:
        deed()
    shortening.connect()
    shortening.run_until(lambda: shortening.over)
    assert shortening.shorter().finish()["a"] == model.greedy(prompts[2], 150)


def test_a_pipeline_that_nothing_has_run_through_becomes_shorter(checkpoint, driver, prompts):
    """Its stages were joined while they loaded, and their only client has left."""
    model = checkpoint("llama", 1)
    drivers = [driver() for _ in range(4)]
    for runs, stage in zip(drivers, cuts(4, 4), strict=True):
        runs.load(model, INSTANCE, stage=stage)
    pipeline = connect(drivers, random.Random(0), vouched=False)
    for runs in drivers:
        runs.engine.vouch(INSTANCE)
    shortening = Shortening(pipeline, model, {0: Stage(0, 2), 2: Stage(2, 4)})
    shortening.run()
    shorter = shortening.shorter()
    shorter.lead.add("a", prompts[2], max_tokens=20)
    assert shorter.finish()["a"] == model.greedy(prompts[2], 20)


@pytest.mark.parametrize("closed", [0, 1])
def test_a_ring_that_breaks_before_it_runs_is_made_again(closed, checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 4))
    pipeline.lead.add("a", prompts[2], max_tokens=150)
    some_tokens(pipeline, "a", 5)
    shortening = Shortening(pipeline, model, {0: Stage(0, 2), 2: Stage(2, 4)})
    for deed in shortening.deeds[1:]:
        deed()
    channels = shortening.connect()
    lead_of = pipeline.lead.engine._stages[INSTANCE]
    shortening.run_until(lambda: lead_of.pipeline._growth is not None)
    channels[closed][0].close()
    shortening.run_until(lambda: len(shortening.unformed) == 2)
    assert {one.code for one in shortening.unformed} == {"worker_lost"}
    shortening.unformed.clear()
    some_tokens(pipeline, "a", 5)
    shortening.connect()
    shortening.run_until(lambda: shortening.over)
    assert shortening.shorter().finish()["a"] == model.greedy(prompts[2], 150)


@pytest.mark.parametrize("dead", [1, 2, 3])
@pytest.mark.usefixtures("one_question_at_a_time")
@pytest.mark.parametrize("state", list(GrowthState)[1:])
def test_a_stage_that_dies_meanwhile_ends_the_requests(state, dead, checkpoint, driver, prompts):
    """They go on elsewhere, from their tokens; what is left can join anew."""
    model = checkpoint("llama", 1)
    pipeline = staged(driver, model, cuts(4, 4))
    pipeline.lead.add("a", prompts[2], max_tokens=150)
    some_tokens(pipeline, "a", 5)
    shortening = Shortening(pipeline, model, {0: Stage(0, 2), 2: Stage(2, 4)})
    for deed in shortening.deeds:
        deed()
    lead_of = pipeline.lead.engine._stages[INSTANCE]
    shortening.run_until(
        lambda: (growing := lead_of.pipeline._growth) is not None and growing.state is state
    )
    pipeline.drivers[dead].engine.drop(INSTANCE)
    del pipeline.drivers[dead]
    shortening.remaining = {}
    shortening.run_until(lambda: lead_of.pipeline is None)
    ended = pipeline.lead.outputs["a"]
    assert (ended.finish, ended.code) == (FinishReason.ERROR, "worker_lost")
    assert ended.token_ids == model.greedy(prompts[2], 150)[: len(ended.token_ids)]
    shortening.run_until(lambda: not any(runs.engine.has_work for runs in pipeline.drivers))
    for runs in pipeline.drivers:
        assert runs.engine._stages[INSTANCE].pipeline is None
        runs.engine.unload(INSTANCE)
        assert runs.engine.backed_bytes == 0


def test_what_is_in_no_pipeline_has_no_place_in_a_shorter_one(checkpoint, driver):
    model = checkpoint("llama", 1)
    runs = driver()
    runs.load(model, INSTANCE, stage=Stage(0, 2))
    one, other = memory_channel(monotonic)
    with pytest.raises(BadRequest, match="in no pipeline"):
        runs.engine.shorten(INSTANCE, Stage(0, 3), one, other)
    pipeline = staged(driver, model, cuts(4, 2))
    with pytest.raises(BadRequest, match="has not its layers"):
        pipeline.lead.engine.shorten(INSTANCE, Stage(1, 4), one, other)
