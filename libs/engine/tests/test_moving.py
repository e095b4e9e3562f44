"""Requests that move in mid-generation, with their KV: from engine to engine, from one cut of the
layers to another.
"""

import random

import pytest
import torch
from families import FAMILIES
from pipelines import INSTANCE, MemoryPipeline, cuts, staged

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.errors import BadRequest, NoRoom, StageBusy
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.pipeline import lead
from pilotlight.engine.resident import ResidentStage
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import FinishReason, RequestKey

SAMPLED = {"temperature": 0.8, "top_p": 0.9}
CONTROLLED = {
    "temperature": 1.3,
    "top_k": 50,
    "min_p": 0.01,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((3, 2.0), (50, -4.0)),
    "stop_token_ids": (8, 9),
    "min_tokens": 22,
}
WHOLE = [Stage(0, 4)]


@pytest.fixture(autouse=True)
def no_looking_out(monkeypatch):
    """All stages take turns in one thread: while one waits, no other can answer."""
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)


def expected_of(driver, model, prompt, **sampling):
    alone = driver(BatchLimits(prefix_cache=False))
    alone.load(model)
    alone.add("x", prompt, **sampling)
    return alone.finish()["x"]


def group(driver, model, stages, seed):
    """Engines that hold a model in these stages, driven in random turns; a whole model is a group
    of one.
    """
    if stages != WHOLE:
        return staged(
            driver, model, stages, seed=seed, limits=BatchLimits(step_tokens=20, running=12)
        )
    alone = driver(BatchLimits(step_tokens=20, running=12))
    alone.load(model)
    return MemoryPipeline([alone], random.Random(seed))


def pieces_of(pipeline, stages, key, since=0):
    return [
        piece
        for runs, stage in zip(pipeline.drivers, stages, strict=True)
        for piece in runs.engine.export_kv(INSTANCE, [key], stage, since)
    ]


def move(source, source_stages, target, name, early, torn, late=True):
    """What a mover does: a copy while the request goes on, the rest at the end (if not late, it
    does not come), and the request.
    """
    key = RequestKey(RequestId(name), 1)
    pieces = list(early)
    since = min((piece.stop for piece in early), default=0)
    pieces += pieces_of(source, source_stages, key, since) if late else []
    if torn and pieces:
        pieces.pop()
    released = source.lead.engine.release(key.request_id, key.attempt)
    output = source.lead.outputs.pop(name)
    assert list(released.output_ids) == output.token_ids
    target.lead.outputs[name] = output
    target.lead.engine.add(
        key.request_id,
        1,
        INSTANCE,
        released.prompt_ids,
        released.output_ids,
        released.sampling,
        released.deadline_s,
        pieces,
    )
    return pieces


CUTS = [WHOLE, cuts(4, 2), [Stage(0, 1), Stage(1, 3), Stage(3, 4)], cuts(4, 4)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_moved_requests_have_the_same_tokens_and_so_have_those_that_stay(
    kind, checkpoint, driver, prompts
):
    model, chance = checkpoint(kind, 1), random.Random(kind)
    names = [f"{kind}{index}" for index in range(8)]
    settings = {
        name: {"seed": index, **({}, SAMPLED, CONTROLLED)[index % 3]}
        for index, name in enumerate(names)
    }
    prompt_of = {name: prompts[index % 4] for index, name in enumerate(names)}
    expected = {
        name: expected_of(driver, model, prompt_of[name], **settings[name]) for name in names
    }
    from_stages, to_stages = chance.sample(CUTS, 2)
    source, target = group(driver, model, from_stages, 1), group(driver, model, to_stages, 2)
    for name in names[:6]:
        source.lead.add(name, prompt_of[name], **settings[name])
    for name in names[6:]:
        target.lead.add(name, prompt_of[name], **settings[name])
    moved = used = 0
    for tokens, name in zip(
        sorted(chance.choices(range(20), k=4)), chance.sample(names[:6], 4), strict=True
    ):
        source.run_until(
            lambda name=name, tokens=tokens: len(source.lead.outputs[name].token_ids) >= tokens
        )
        early = pieces_of(source, from_stages, RequestKey(RequestId(name), 1))
        for _ in range(chance.randrange(4)):
            source.step()
            target.step()
        if source.lead.outputs[name].finish is None:
            used += len(move(source, from_stages, target, name, early, torn=chance.random() < 0.2))
            assert source.lead.engine._stages.find(RequestKey(RequestId(name), 1)) is None
            moved += 1
    assert moved >= 2
    assert used > 0
    outputs = source.finish() | target.finish()
    assert outputs == expected


def test_what_moved_is_not_computed_again(checkpoint, driver, prompts):
    model = checkpoint("llama")
    source, target = group(driver, model, cuts(4, 2), 0), group(driver, model, WHOLE, 0)
    source.lead.add("a", prompts[2], max_tokens=24)
    source.run_until(lambda: len(source.lead.outputs["a"].token_ids) == 10)
    while any(runs.engine.has_work for runs in source.drivers[1:]):
        source.drivers[1].step()
    move(source, cuts(4, 2), target, "a", [], torn=False)
    assert target.lead.step().batch_tokens == 1
    assert target.finish()["a"] == model.greedy(prompts[2], 24)
    source.lead.add("b", prompts[0])
    assert source.finish()["b"] == model.greedy(prompts[0], 24)


@pytest.mark.parametrize("lost", range(6))
def test_of_kv_with_holes_what_comes_before_the_first_one_is_used(
    lost, checkpoint, driver, prompts
):
    """Pieces of three times, of two stages each; one of the six does not come."""
    model, stages = checkpoint("mistral"), cuts(4, 2)
    source, target = group(driver, model, stages, 0), group(driver, model, WHOLE, 0)
    source.lead.add("a", prompts[1], max_tokens=40)
    pieces, ends, key = [], [], RequestKey(RequestId("a"), 1)
    for tokens in (4, 9, 14):
        source.run_until(lambda tokens=tokens: len(source.lead.outputs["a"].token_ids) == tokens)
        while any(runs.engine.has_work for runs in source.drivers[1:]):
            source.drivers[1].step()
        pieces += pieces_of(source, stages, key, ends[-1] if ends else 0)
        ends.append(pieces[-1].stop)
    assert [piece.stop - piece.start for piece in pieces] == [26, 26, 5, 5, 5, 5], (
        "the last token has not run"
    )
    del pieces[lost]
    move(source, stages, target, "a", pieces, torn=False, late=False)
    computed = target.lead.step().batch_tokens
    assert computed == min(20, len(prompts[1]) + 14 - [0, *ends][lost // 2]), "a step has 20 tokens"
    assert target.finish()["a"] == model.greedy(prompts[1], 40)


def test_a_request_under_way_in_a_pipeline_can_leave(checkpoint, driver, prompts):
    """Its token comes back to an engine without it; the target samples it again."""
    model = checkpoint("llama")
    source, target = group(driver, model, cuts(4, 4), 0), group(driver, model, cuts(4, 2), 0)
    source.lead.add("a", prompts[1])
    source.lead.add("b", prompts[2])
    for _ in range(8):
        source.lead.step()
    move(source, cuts(4, 4), target, "a", [], torn=False)
    assert (source.finish()["b"], target.finish()["a"]) == (
        model.greedy(prompts[2], 24),
        model.greedy(prompts[1], 24),
    )


def test_a_move_that_has_no_room_is_refused_and_changes_nothing(checkpoint, driver, prompts):
    model = checkpoint("llama")
    source, target = group(driver, model, WHOLE, 0), driver()
    target.load(model, kv_tokens=96)
    target.add("here", prompts[2], max_tokens=20)
    target.step()
    source.lead.add("a", prompts[1])
    for _ in range(4):
        source.step()
    key = RequestKey(RequestId("a"), 1)
    pieces = pieces_of(source, WHOLE, key)
    arguments = (key.request_id, 1, INSTANCE, prompts[1], source.lead.outputs["a"].token_ids)
    sampling = source.lead.engine._stages.find(key)[1].sampling
    with pytest.raises(NoRoom, match="no room now"):
        target.engine.add(*arguments, sampling, None, pieces)
    narrow = [
        KvPiece(
            key=key, layers=Stage(0, 4), start=0, keys_and_values=pieces[0].keys_and_values[..., :6]
        )
    ]
    single = [
        KvPiece(
            key=key, layers=Stage(0, 4), start=0, keys_and_values=pieces[0].keys_and_values.float()
        )
    ]
    for wrong in (narrow, single):
        with pytest.raises(BadRequest, match="KV piece"):
            target.engine.add(*arguments, sampling, None, wrong)
    with pytest.raises(BadRequest, match="not within"):
        staged(driver, model, cuts(4, 2)).lead.engine.export_kv(INSTANCE, [key], Stage(1, 3))
    assert target.finish()["here"] == model.greedy(prompts[2], 20)
    assert source.finish()["a"] == model.greedy(prompts[1], 24)
    with pytest.raises(BadRequest, match="not here"):
        target.engine.release(RequestId("a"), 1)


def test_ranges_of_different_batches_take_turns(checkpoint, chain, prompts):
    """As in live scaling: a batch stops after some layers while another one runs, on the same
    KV.
    """
    model, chance = checkpoint("gemma3"), random.Random(4)
    (runner,) = chain(model, 1, 32).runners
    batches = [
        [
            Batch((Segment(0, len(prompt), tuple(range(8 * index, 8 * index + 5)), True),)),
            torch.tensor(prompt),
            0,
        ]
        for index, prompt in enumerate(prompts)
    ]
    while any(done < 4 for _, _, done in batches):
        batch = chance.choice([batch for batch in batches if batch[2] < 4])
        stop = chance.randint(batch[2] + 1, 4)
        batch[1] = runner.run(batch[0], batch[1], Stage(batch[2], stop))
        batch[2] = stop
    for (_, logits, _), prompt in zip(batches, prompts, strict=True):
        torch.testing.assert_close(logits, model.logits(prompt)[-1:], rtol=0, atol=1e-10)


def test_a_range_runs_as_soon_as_its_layers_are_there(checkpoint, clock):
    model = checkpoint("llama")
    stage = ResidentStage(
        "i", model.spec, Stage(0, 4), model.spec.dtype, 1 << 22, BatchLimits(), CpuArena()
    )
    batch = Batch((Segment(0, 3, (0,), True),))
    for part in (0, 1, 2):
        stage.place(part, model.parts[part], clock)
    hidden = stage.run(batch, torch.tensor([1, 2, 3]), Stage(0, 2))
    with pytest.raises(BadRequest, match="not in place yet: \\[3\\]"):
        stage.run(batch, hidden, Stage(2, 3))
    for part in (3, 4, 5):
        stage.place(part, model.parts[part], clock)
    logits = stage.run(batch, hidden, Stage(2, 4))
    torch.testing.assert_close(logits, model.logits([1, 2, 3])[-1:], rtol=0, atol=1e-10)
    for wrong in (Stage(2, 5), Stage(4, 6)):
        with pytest.raises(BadRequest, match="not within"):
            stage.run(batch, hidden, wrong)


@pytest.mark.parametrize("seed", range(4))
def test_kv_that_grows_and_shrinks_changes_no_token(seed, checkpoint, driver, prompts):
    model, chance = checkpoint("mistral", 1), random.Random(seed)
    runs = driver()
    room = runs.load(model, kv_tokens=1024)
    runs.capacity_tokens = 1 << 30
    expected = {}
    for index in range(10):
        prompt = prompts[index % 4]
        runs.add(str(index), prompt, max_tokens=20 + index)
        expected[str(index)] = model.greedy(prompt, 20 + index)
    changes = 0
    while runs.engine.has_work:
        runs.step()
        if chance.random() < 0.3:
            tokens = 16 * chance.randint(4, 40)
            try:
                grown = runs.engine.resize(
                    INSTANCE, room.parameter_bytes + tokens * room.kv_bytes_per_token
                )
            except NoRoom:
                continue
            changes += 1
            assert grown.kv_capacity_tokens == tokens
            runs.engine._stages[INSTANCE].scheduler._tables.check()
    assert {name: output.token_ids for name, output in runs.outputs.items()} == expected
    assert changes > 5
    assert runs.preemptions == 0 or runs.outputs["0"].finish is FinishReason.LENGTH


def test_kv_does_not_shrink_below_what_a_request_here_may_reach(checkpoint, driver, prompts):
    runs, model = driver(), checkpoint("llama")
    room = runs.load(model, kv_tokens=256)
    runs.add("a", prompts[2], max_tokens=40)
    needed = room.parameter_bytes + 112 * room.kv_bytes_per_token
    with pytest.raises(NoRoom, match="110 tokens"):
        runs.engine.resize(INSTANCE, needed - 1)
    runs.engine.resize(INSTANCE, needed)
    runs.capacity_tokens = 112
    assert runs.finish()["a"] == model.greedy(prompts[2], 40)
    with pytest.raises(StageBusy):
        staged(driver, model, cuts(4, 2)).lead.engine.resize(INSTANCE, 1 << 22)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_kv_that_has_to_shrink_keeps_what_fits_and_sends_the_rest_elsewhere(
    checkpoint, driver, prompts, steps
):
    """In the middle of a prompt, and of outputs: none is lost, and tokens are the same."""
    runs, model = driver(BatchLimits(step_tokens=16, running=8)), checkpoint("llama")
    room = runs.load(model, kv_tokens=512)
    runs.add("stays", prompts[1], max_tokens=20)
    runs.add("goes", prompts[2], max_tokens=100)
    for _ in range(steps):
        runs.step()
    before = len(runs.outputs["goes"].token_ids)
    runs.engine.resize(INSTANCE, room.parameter_bytes + 64 * room.kv_bytes_per_token, must=True)
    runs.capacity_tokens = 64
    runs.engine._stages[INSTANCE].scheduler._tables.check()
    while runs.engine.has_work:
        runs.step()
    assert runs.outputs["stays"].token_ids == model.greedy(prompts[1], 20)
    gone = runs.outputs["goes"]
    assert (gone.finish, gone.code) == (FinishReason.ERROR, "not_loaded")
    assert gone.token_ids == model.greedy(prompts[2], 100)[:before]
