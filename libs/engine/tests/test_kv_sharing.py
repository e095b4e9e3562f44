"""Requests that move to another engine, which asks the one that they leave for their KV: from the
lead of a group to what another of its stages has become, at any moment.
"""

import random
import socket
import threading
from time import monotonic

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import INSTANCE, MemoryPipeline, cuts, staged

from pilotlight.engine import kv_moves
from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.stream import StreamChannel
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.errors import PeerLost, PeerSilent
from pilotlight.engine.kv_pieces import KvPiece
from pilotlight.engine.kv_sharing import KvAsked, answer, ask
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import lead
from pilotlight.policy.ids import RequestId
from pilotlight.policy.model import Stage
from pilotlight.policy.request import RequestKey, Sampling

TOKENS = 90
KV_TOKENS = 1024
MOVES = {"temperature": 0.9, "top_p": 0.95, "seed": 3, "max_tokens": TOKENS}


@pytest.fixture(autouse=True)
def in_one_thread(monkeypatch):
    """All stages take turns: while one waits, no other can answer. Each layer is asked for."""
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)
    monkeypatch.setattr(kv_moves, "READ_BYTES", 1)


def whole(driver, model, seed=0):
    """An engine with all layers; every step of it is taken when it is asked for."""
    alone = driver(BatchLimits(step_tokens=24, running=12))
    alone.load(model, INSTANCE)
    return MemoryPipeline([alone], random.Random(seed))


def pieces_of(engine, name, token_ids, between=lambda: None):
    """What one that asks gets, with something going on between two layers."""
    pieces, layer = [], 0
    while (found := engine.shared_kv(INSTANCE, token_ids, layer, on_device=False)) is not None:
        layers, tensor = found
        pieces.append(
            KvPiece(
                key=RequestKey(RequestId(name), 2), layers=layers, start=0, keys_and_values=tensor
            )
        )
        layer = layers.stop
        between()
    return pieces


def some_tokens(pipeline, name, count):
    pipeline.run_until(lambda: len(pipeline.lead.outputs[name].token_ids) >= count)


def grow(pipeline, model):
    """The lead takes all layers over, in mid-generation."""
    lead_engine, spec = pipeline.lead.engine, model.spec
    device_bytes = parameter_bytes(decoder_of(spec), spec.whole, spec.dtype)
    device_bytes += KV_TOKENS * spec.kv_bytes_per_token(spec.whole, spec.dtype)
    stage = lead_engine._stages[INSTANCE]
    held = stage.parameters.parts
    for part in lead_engine.extend(INSTANCE, spec.whole, device_bytes).parts:
        if part not in held:
            lead_engine.place_part(INSTANCE, part, model.parts[part])
    pipeline.run_until(lambda: stage.pipeline is None)


def leave(source, name):
    """As when a gateway cancels: what there is of it so far, and goes on elsewhere."""
    output = source.lead.outputs[name]
    had = list(output.token_ids)
    source.lead.engine.abort(RequestId(name), 1)
    source.run_until(lambda: output.finish is not None)
    del source.lead.outputs[name]
    output.token_ids, output.finish = had, None
    return output


def arrive(target, name, prompt, output, pieces, **sampling):
    """It goes on there, under its next attempt's number; the tokens of its first step."""
    parameters = Sampling(**{"seed": 0, "max_tokens": 24, "temperature": 0.0, **sampling})
    target.lead.engine.add(
        RequestId(name), 2, INSTANCE, prompt, output.token_ids, parameters, pieces=pieces
    )
    target.lead.outputs[name] = output
    return target.lead.step().batch_tokens


KNOWN: dict[tuple[int, ...], list[int]] = {}


def expected_of(driver, model, prompt):
    """What one engine alone says to a prompt, of all that moves."""
    if tuple(prompt) not in KNOWN:
        alone = driver(BatchLimits(prefix_cache=False))
        alone.load(model, INSTANCE)
        alone.add("x", prompt, **MOVES)
        KNOWN[tuple(prompt)] = alone.finish()["x"]
    return KNOWN[tuple(prompt)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tokens_are_the_same_whenever_a_request_moves(data, checkpoint, driver, prompts):
    """From a group of which the lead has just become whole, or a while after that; also where the
    lead goes on with others meanwhile, and gives their blocks away.
    """
    model = checkpoint("llama", 1)
    stages = data.draw(st.sampled_from([cuts(4, 2), cuts(4, 4)]))
    seed = data.draw(st.integers(0, 99))
    before, after = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 25))
    seen = data.draw(st.integers(0, 3), label="tokens that have not come to the gateway")
    meanwhile = data.draw(st.integers(0, 3), label="steps between two layers")
    prompt = data.draw(st.sampled_from(prompts))
    limits = BatchLimits(step_tokens=24, running=12)
    source = staged(driver, model, stages, seed=seed, limits=limits, kv_tokens=KV_TOKENS)
    source.lead.add("moves", prompt, **MOVES)
    source.lead.add("stays", prompts[1], max_tokens=TOKENS)
    some_tokens(source, "moves", before)
    grow(source, model)
    some_tokens(source, "moves", min(before + after, TOKENS - 4))
    target = whole(driver, model)
    output = leave(source, "moves")
    del output.token_ids[max(1, len(output.token_ids) - seen) :]
    token_ids = [*prompt, *output.token_ids]

    def goes_on() -> None:
        for _ in range(meanwhile):
            source.step()

    pieces = pieces_of(source.lead.engine, "moves", token_ids, goes_on)
    arrive(target, "moves", prompt, output, pieces, **MOVES)
    assert target.finish()["moves"] == expected_of(driver, model, prompt)
    assert source.finish()["stays"] == model.greedy(prompts[1], TOKENS)


def test_what_was_computed_is_not_computed_again(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    source, target = staged(driver, model, cuts(4, 2), kv_tokens=KV_TOKENS), whole(driver, model)
    source.lead.add("a", prompts[2], max_tokens=40)
    some_tokens(source, "a", 5)
    grow(source, model)
    some_tokens(source, "a", 10)
    output = leave(source, "a")
    token_ids = [*prompts[2], *output.token_ids]
    pieces = pieces_of(source.lead.engine, "a", token_ids)
    assert {piece.layers for piece in pieces} == {Stage(layer, layer + 1) for layer in range(4)}
    ran = arrive(target, "a", prompts[2], output, pieces, max_tokens=40)
    assert ran <= BLOCK_TOKENS, "what does not fill a block"
    assert target.finish()["a"] == model.greedy(prompts[2], 40)


def test_what_is_given_to_others_meanwhile_is_found_no_more(checkpoint, driver, prompts):
    """Later layers have less of it, or nothing: that much is computed."""
    model = checkpoint("llama", 1)
    alone = driver(BatchLimits(step_tokens=64, running=8))
    alone.load(model, INSTANCE, kv_tokens=128)
    source, target = MemoryPipeline([alone], random.Random(0)), whole(driver, model)
    prompt = list(range(1, 70))
    alone.add("a", prompt, max_tokens=40)
    some_tokens(source, "a", 8)
    output = leave(source, "a")
    crowds = iter(range(9))

    def crowd() -> None:
        number = next(crowds)
        alone.add(f"b{number}", [90 - number, *range(1, 60)], max_tokens=2)
        alone.finish()

    pieces = pieces_of(alone.engine, "a", [*prompt, *output.token_ids], crowd)
    assert pieces, "the first layers have something"
    shortest = min(piece.stop for piece in pieces)
    assert len(pieces) < 4 or shortest < pieces[0].stop
    arrive(target, "a", prompt, output, pieces, max_tokens=40)
    assert target.finish()["a"] == model.greedy(prompt, 40)


def test_a_stage_of_several_gives_nothing(checkpoint, driver, prompts):
    """It has a part of the layers alone; and so it is with an instance that is not here."""
    model = checkpoint("llama", 1)
    source = staged(driver, model, cuts(4, 2))
    source.lead.add("a", prompts[2], max_tokens=30)
    some_tokens(source, "a", 20)
    for runs in source.drivers:
        assert runs.engine.shared_kv(INSTANCE, prompts[2], 0, on_device=False) is None
        assert runs.engine.shared_kv("another", prompts[2], 0, on_device=False) is None


# Over a channel.


def ends():
    """Of one channel, for two threads."""
    return tuple(StreamChannel(end, monotonic) for end in socket.socketpair())


def answering(channel, find, timeout_s=5.0):
    """A thread that answers; the errors that it met."""
    met = []

    def run() -> None:
        try:
            answer(channel, find, timeout_s)
        except (PeerLost, PeerSilent) as error:
            met.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, met


def test_one_asks_and_the_other_gives(checkpoint, driver, prompts):
    model = checkpoint("llama", 1)
    source, target = whole(driver, model), whole(driver, model)
    source.lead.add("a", prompts[2], max_tokens=40)
    some_tokens(source, "a", 12)
    output = leave(source, "a")
    here, there = ends()
    engine = source.lead.engine
    thread, met = answering(
        there,
        lambda asked, layer: engine.shared_kv(
            asked.instance_id, asked.token_ids, layer, on_device=False
        ),
    )
    asked = KvAsked(instance_id=INSTANCE, token_ids=(*prompts[2], *output.token_ids))
    pieces = ask(here, asked, RequestKey(RequestId("a"), 2), lambda: 5.0)
    here.close()
    thread.join(10)
    assert not thread.is_alive()
    assert all(isinstance(error, PeerLost) for error in met), "it hangs up when it has all"
    ran = arrive(target, "a", prompts[2], output, pieces, max_tokens=40)
    assert ran <= BLOCK_TOKENS
    assert target.finish()["a"] == model.greedy(prompts[2], 40)


def test_nothing_there_is_an_answer(driver):
    here, there = ends()
    thread, _ = answering(there, lambda asked, layer: None)
    asked = KvAsked(instance_id=INSTANCE, token_ids=(1, 2))
    assert ask(here, asked, RequestKey(RequestId("a"), 1), lambda: 5.0) == ()
    here.close()
    thread.join(10)


@pytest.mark.parametrize("header", [b"", b"nonsense", b"\x81\xa4type\xa8kv_found"])
def test_nonsense_is_no_kv(header):
    here, there = ends()
    there.send(Frame(header, memoryview(b"")), 1)
    asked = KvAsked(instance_id=INSTANCE, token_ids=(1, 2))
    with pytest.raises(PeerLost, match="no KV"):
        ask(here, asked, RequestKey(RequestId("a"), 1), lambda: 1.0)


def test_nonsense_is_no_question():
    here, there = ends()
    here.send(Frame(b"nonsense", memoryview(b"")), 1)
    with pytest.raises(PeerLost, match="no question"):
        answer(there, lambda asked, layer: None, 1.0)


def test_one_that_says_nothing_is_waited_for_no_longer_than_there_is_time():
    here, _there = ends()
    asked = KvAsked(instance_id=INSTANCE, token_ids=(1, 2))
    with pytest.raises(PeerSilent):
        ask(here, asked, RequestKey(RequestId("a"), 1), lambda: 0.0)
