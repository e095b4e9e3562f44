"""A stage that grows copies its parameters from the device of the stage that has them; with fake
devices, whose memory two arenas map.
"""

import gc
import random

import msgspec
import pytest
import torch
from fake_cuda import fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from lending_engines import Growing, Lenders, lent_by
from pipelines import INSTANCE, cuts

from pilotlight.engine.channel import mailbox
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda.lending import CudaLending
from pilotlight.engine.errors import EngineFailed
from pilotlight.engine.pipeline import borrowing, frames, growth, lead, lending, meeting
from pilotlight.engine.pipeline.frames import PartLent
from pilotlight.policy.model import Stage

OUT_OF_MEMORY = 2
MAX_TOKENS = 60
DEVICE = "device"


@pytest.fixture(autouse=True, scope="module")
def no_waiting():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lead, "LOOK_OUT_S", 0.0)
        patch.setattr(growth, "COPY_BYTES", 3 * 2 * 16 * 2 * 12 * 8)
        yield


@pytest.fixture
def lenders(driver):
    yield from lent_by(driver)


def started(pipeline, prompts):
    for index, prompt in enumerate(prompts):
        pipeline.lead.add(str(index), prompt, max_tokens=MAX_TOKENS)
    outputs = pipeline.lead.outputs
    pipeline.run_until(lambda: all(len(one.token_ids) > 3 for one in outputs.values()))
    return outputs


def grown(model, pipeline, prompts, target=None):
    """Through a consolidation to the end of all requests, whose tokens are those of one engine."""
    outputs = started(pipeline, prompts)
    growing = Growing(model, pipeline, target)
    growing.run(lambda: all(one.finish is not None for one in outputs.values()))
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)].token_ids == model.greedy(prompt, MAX_TOKENS)
    return growing


def holds(engine, model, parts):
    """The engine has these parts, bit for bit."""
    memory = engine._stages[INSTANCE].memory
    for part in parts:
        prefix = memory.decoder.prefix(part)
        for name, tensor in memory.tensors(part).items():
            stored = model.parts[part][prefix + name][2]
            assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bytes(stored)


@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [("llama", 2), ("llama", 4), ("llama-tied", 2), ("gemma3", 2), ("qwen3-moe", 2)],
)
def test_parameters_come_from_the_neighbours_device(lenders, checkpoint, prompts, kind, num_stages):
    model = checkpoint(kind, 1)
    pipeline = lenders.pipeline([model] * num_stages, cuts(4, num_stages))
    growing = grown(model, pipeline, prompts)
    assert set(growing.ways.values()) == {DEVICE}
    assert len(growing.ways) == 4 - 4 // num_stages + 1
    assert not pipeline.lead.engine.channels
    holds(pipeline.lead.engine, model, growing.placed)
    stored = {
        part: sum(buffer.nbytes for _, _, buffer in model.parts[part].values())
        for part in growing.placed
    }
    assert {part: one.by_device_bytes for part, one in growing.placed.items()} == stored


def test_parts_may_be_offered_in_any_order(lenders, checkpoint, prompts):
    """None waits until those that nobody offers are placed."""
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 2, cuts(4, 2))
    outputs = started(pipeline, prompts)
    growing = Growing(model, pipeline)
    growing.left.reverse()
    growing.run(lambda: all(one.finish is not None for one in outputs.values()))
    assert growing.ways == {5: DEVICE, 4: DEVICE, 3: DEVICE}


def test_only_what_is_wanted_of_a_longer_range_comes(lenders, checkpoint, prompts):
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 4, cuts(4, 4))
    growing = grown(model, pipeline, prompts, Stage(0, 3))
    assert growing.ways == {2: DEVICE, 3: DEVICE}
    again = Growing(model, pipeline)
    again.run(lambda: not pipeline.lead.engine.channels)
    assert again.ways == {4: DEVICE, 5: DEVICE}
    holds(pipeline.lead.engine, model, range(6))


@pytest.mark.parametrize("hosts", ["dc", "cd", "cc", "ddc", "dcd"])
def test_where_a_stage_is_on_no_device_all_come_from_the_pool(lenders, checkpoint, prompts, hosts):
    """Silently: nobody is asked."""
    model = checkpoint("llama", 1)
    stages = cuts(4, 2) if len(hosts) == 2 else [Stage(0, 1), Stage(1, 3), Stage(3, 4)]
    growing = grown(model, lenders.pipeline([model] * len(hosts), stages, hosts=hosts), prompts)
    assert set(growing.ways.values()) == {"pool"}


def test_an_older_release_is_asked_nothing(lenders, checkpoint, prompts, monkeypatch):
    hello_of = meeting.hello_of

    def older(resident, stage, *, loading=False):
        return msgspec.structs.replace(hello_of(resident, stage, loading=loading), lends=False)

    monkeypatch.setattr("pilotlight.engine.pipeline.follow.hello_of", older)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    assert set(growing.ways.values()) == {"pool"}


def test_stages_of_two_hosts_say_why(lenders, checkpoint, prompts, monkeypatch):
    monkeypatch.setattr(lending, "is_here", lambda address: False)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    assert all("another host" in why for why in growing.ways.values())


def test_in_another_network_namespace_descriptors_do_not_arrive(
    lenders, checkpoint, prompts, monkeypatch
):
    monkeypatch.setattr(lending, "post", refuse_to_post)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    assert all("cannot be reached" in why for why in growing.ways.values())


def refuse_to_post(address, nonce, *descriptors):
    raise ConnectionRefusedError("nobody is there")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_descriptor_that_is_lost_ends_the_asking(lenders, checkpoint, prompts, monkeypatch, lost):
    sent = []

    def post(address, nonce, *descriptors):
        sent.append(nonce)
        if len(sent) - 1 != lost:
            mailbox.post(address, nonce, *descriptors)

    monkeypatch.setattr(lending, "post", post)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    ways = list(growing.ways.values())
    assert ways[:lost] == [DEVICE] * lost
    assert "the descriptors did not come" in ways[lost]
    assert DEVICE not in ways[lost + borrowing.ASKED_AT_ONCE :]
    holds(pipeline_lead(lenders), model, growing.placed)


def pipeline_lead(lenders):
    return lenders.made[0][0].engine


def test_a_wrong_sum_has_that_part_come_from_the_pool(lenders, checkpoint, prompts, monkeypatch):
    take_in = borrowing.BorrowedParts.take_in

    def wrong(self, lent):
        if lent.part == 4:
            lent = msgspec.structs.replace(lent, total=lent.total + 1)
        take_in(self, lent)

    monkeypatch.setattr(borrowing.BorrowedParts, "take_in", wrong)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    assert growing.ways == {3: DEVICE, 4: "what came is not what was lent", 5: DEVICE}
    holds(pipeline_lead(lenders), model, growing.placed)


def test_what_changed_after_it_was_summed_up_is_noticed(lenders, checkpoint, prompts, monkeypatch):
    """The lender's memory became another model's while it was read."""
    borrow = CudaLending.borrow

    def late(self, lent, extent):
        memory = lenders.made[1][0].engine._stages[INSTANCE].memory
        kept = memory.tensors(3)["mlp.up_proj.weight"].clone()
        memory.tensors(3)["mlp.up_proj.weight"].zero_()
        borrowed = borrow(self, lent, extent)
        memory.tensors(3)["mlp.up_proj.weight"].copy_(kept)
        return borrowed

    monkeypatch.setattr(CudaLending, "borrow", late)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    assert growing.ways == {3: "what came is not what was lent", 4: DEVICE, 5: DEVICE}


def test_another_models_parts_of_the_same_form_are_refused(lenders, checkpoint):
    """No request runs: its tokens would be of both."""
    model, other = checkpoint("llama", 1), checkpoint("llama", 2)
    pipeline = lenders.pipeline([model, other], cuts(4, 2))
    growing = Growing(model, pipeline)
    growing.run(lambda: not pipeline.lead.engine.channels)
    assert set(growing.ways.values()) == {"what came is of another model"}
    holds(pipeline_lead(lenders), model, growing.placed)


def test_what_cannot_be_looked_at_is_not_taken(lenders, checkpoint, prompts, monkeypatch):
    def refuse(self, tensors, num_bytes):
        raise EngineFailed("not now")

    monkeypatch.setattr(CudaLending, "peek", refuse)
    model = checkpoint("llama", 1)
    growing = grown(model, lenders.pipeline([model] * 2, cuts(4, 2)), prompts)
    assert set(growing.ways.values()) == {"not now"}


@pytest.mark.parametrize(
    ("field", "says"),
    [("form", "lies differently"), ("vouched", "has not all"), ("part", "no stage")],
)
def test_a_stage_that_cannot_lend_a_part_says_why(
    lenders, checkpoint, prompts, monkeypatch, field, says
):
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 2, cuts(4, 2))
    follower = pipeline.drivers[1].engine._stages[INSTANCE]
    ask = lending.LentParts.ask

    def asked(self, wanted, frame, *, is_last):
        if field == "vouched":
            monkeypatch.setattr(follower, "vouched", False)
        changed = {"form": b"other"} if field == "form" else {"part": 1} if field == "part" else {}
        answers = ask(self, msgspec.structs.replace(wanted, **changed), frame, is_last=is_last)
        monkeypatch.setattr(follower, "vouched", True)
        if field == "part":
            said = frames.unpack(answers[0])
            answers = [frames.pack(PartLent(part=wanted.part, why=said.why))]
        return answers

    monkeypatch.setattr(lending.LentParts, "ask", asked)
    growing = grown(model, pipeline, prompts)
    assert all(says in why for why in growing.ways.values())


def test_a_device_that_cannot_reach_the_other_asks_once(lenders, checkpoint, prompts):
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 2, cuts(4, 2))
    outputs = started(pipeline, prompts)
    lenders.fake.fail("cuMemImportFromShareableHandle", OUT_OF_MEMORY, 1)
    growing = Growing(model, pipeline)
    growing.run(lambda: all(one.finish is not None for one in outputs.values()))
    assert all("cannot be shared" in why for why in growing.ways.values())
    assert pipeline.lead.outputs["2"].token_ids == model.greedy(prompts[2], MAX_TOKENS)


def test_a_stage_that_does_not_answer_holds_a_part_up_for_a_while(
    lenders, checkpoint, prompts, monkeypatch
):
    monkeypatch.setattr(lending.LentParts, "ask", lambda self, wanted, frame, *, is_last: [])
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 2, cuts(4, 2))
    outputs = started(pipeline, prompts)
    growing = Growing(model, pipeline)
    for _ in range(50):
        growing.offer()
        pipeline.step()
    assert growing.placed == {}
    lenders.now_s += borrowing.PATIENCE_S
    growing.run(lambda: all(one.finish is not None for one in outputs.values()))
    assert all("no answer within" in why for why in growing.ways.values())


def test_an_answer_that_comes_too_late_is_dropped(lenders, checkpoint, prompts, monkeypatch):
    held, take_in = [], borrowing.BorrowedParts.take_in
    monkeypatch.setattr(borrowing.BorrowedParts, "take_in", lambda self, lent: held.append(lent))
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 2, cuts(4, 2))
    started(pipeline, prompts)
    growing = Growing(model, pipeline)
    pipeline.run_until(lambda: len(held) == borrowing.ASKED_AT_ONCE)
    growing.offer()
    lenders.now_s += borrowing.PATIENCE_S
    while 3 not in growing.placed:
        growing.offer()
    assert "no answer" in growing.ways[3]
    borrowed = pipeline.lead.engine._stages[INSTANCE].pipeline._borrowed
    for lent in held:
        take_in(borrowed, lent)
    growing.run(lambda: not pipeline.lead.engine.channels)
    assert DEVICE not in growing.ways.values()
    holds(pipeline_lead(lenders), model, growing.placed)


def test_a_growth_that_is_called_off_waits_for_what_is_copied(lenders, checkpoint, prompts):
    model = checkpoint("llama", 1)
    pipeline = lenders.pipeline([model] * 2, cuts(4, 2))
    outputs = started(pipeline, prompts)
    resident = pipeline.lead.engine._stages[INSTANCE]
    Growing(model, pipeline)
    backed_bytes = pipeline.lead.engine.backed_bytes
    pipeline.run_until(lambda: bool(resident.pipeline._borrowed._copied))
    assert pipeline.lead.engine.call_off(INSTANCE)
    assert not resident.pipeline._borrowed._copied
    assert pipeline.lead.engine.backed_bytes < backed_bytes
    again = Growing(model, pipeline)
    again.run(lambda: all(one.finish is not None for one in outputs.values()))
    assert set(again.ways.values()) == {DEVICE}
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)].token_ids == model.greedy(prompt, MAX_TOKENS)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_tokens_are_the_same_whenever_the_neighbour_goes(data, checkpoint, driver):
    """Killed: its channels close, and its memory is another model's. The leader goes on alone."""
    gc.collect()
    fake = fake_cuda()
    fake.reset()
    model, lenders = checkpoint("llama", 1), Lenders(fake, driver)
    try:
        seed = data.draw(st.integers(0, 1 << 20))
        pipeline = lenders.pipeline([model] * 2, cuts(4, 2), seed=seed)
        prompt = [index * 7 % 90 for index in range(40)]
        pipeline.lead.add("a", prompt, max_tokens=40)
        pipeline.run_until(lambda: len(pipeline.lead.outputs["a"].token_ids) > 3)
        growing, chance = Growing(model, pipeline), random.Random(seed)
        for _ in range(data.draw(st.integers(0, 60))):
            growing.offer() if chance.random() < 0.3 else pipeline.step()
        gone, arena = lenders.made[1]
        gone.engine.drop(INSTANCE)
        arena.back(Extent(0, 64 << 20))
        arena.tensor(0, (64 << 20,), torch.uint8).fill_(255)
        arena.unback(Extent(0, 64 << 20))
        pipeline.drivers.remove(gone)
        output = pipeline.lead.outputs["a"]
        growing.run(lambda: output.finish is not None)
        assert output.token_ids == model.greedy(prompt, 40)
        holds(pipeline.lead.engine, model, growing.placed)
    finally:
        lenders.close()
