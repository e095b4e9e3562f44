"""A pipeline whose stages have a device each, fake ones: hidden states, and KV that is asked for,
by mapped memory.
"""

import random
import threading
from contextlib import suppress

import pytest
import torch
from channel_ends import tcp_channel
from fake_cuda import fake_cuda
from pipelines import INSTANCE, MemoryPipeline, cuts

from pilotlight.engine.channel import device_path
from pilotlight.engine.channel.device_path import Devices
from pilotlight.engine.cuda.peers import PeerMemory
from pilotlight.engine.device.memory import parameter_bytes
from pilotlight.engine.errors import PeerLost
from pilotlight.engine.kv_sharing import KvAsked, answer, ask
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.pipeline import frames, growth, lead
from pilotlight.native.device import Device
from pilotlight.policy.request import RequestKey, Sampling

MIB = 1 << 20
KV_TOKENS = 4096


@pytest.fixture
def devices(monkeypatch):
    """devices(ways): a device that says what goes by it; every tensor is taken for one on it."""
    fake = fake_cuda()
    fake.reset()
    monkeypatch.setattr(frames, "on_device", lambda tensor: True)
    monkeypatch.setattr(device_path, "LEAST_BYTES", 1)
    monkeypatch.setattr(lead, "LOOK_OUT_S", 0.0)
    before = fake.reserved, fake.used_bytes
    yield lambda ways: Devices(PeerMemory(Device(0, fake.path), torch.device("cpu")), ways.append)
    assert (fake.reserved, fake.used_bytes) == before


@pytest.fixture
def joined(devices, driver, checkpoint):
    """joined(kind, stages, mapped): a pipeline over TCP, and what the channels between its stages
    said; ``mapped`` says of each whether its ends know of devices.
    """
    made = []

    def join(kind, stages, mapped):
        model = checkpoint(kind, 1)
        drivers, ways = [driver() for _ in stages], [[] for _ in stages]
        channels = []
        for said, knows in zip(ways, mapped, strict=True):
            ends = (devices(said), devices([])) if knows else (None, None)
            channels.append(tcp_channel(16, *ends))
            channels[-1][0].offer_device(16 * MIB)
        made.extend(end for ends in channels for end in ends)
        for one, stage in zip(drivers, stages, strict=True):
            one.load(model, INSTANCE, kv_tokens=KV_TOKENS, stage=stage)
        for index, one in enumerate(drivers):
            one.engine.connect(INSTANCE, channels[index - 1][1], channels[index][0])
        pipeline = MemoryPipeline(drivers, random.Random(3))
        pipeline.run_until(lambda: pipeline.lead.engine.serves(INSTANCE), 200_000)
        return model, pipeline, ways

    yield join
    for end in made:
        end.close()


def consolidate(model, pipeline, prompts):
    """All requests to their end, and the leader takes everything over meanwhile."""
    for index, prompt in enumerate(prompts):
        pipeline.lead.add(str(index), prompt, max_tokens=60)
    outputs = pipeline.lead.outputs
    pipeline.run_until(lambda: all(len(one.token_ids) > 20 for one in outputs.values()), 200_000)
    spec, engine = model.spec, pipeline.lead.engine
    held = set(engine._stages[INSTANCE].parameters.parts)
    num_bytes = parameter_bytes(decoder_of(spec), spec.whole, spec.dtype)
    num_bytes += KV_TOKENS * spec.kv_bytes_per_token(spec.whole, spec.dtype)
    room = engine.extend(INSTANCE, spec.whole, num_bytes)
    for part in set(room.parts) - held:
        engine.place_part(INSTANCE, part, model.parts[part])
    pipeline.run_until(lambda: all(one.finish is not None for one in outputs.values()), 200_000)
    assert not engine.channels, "the leader runs alone"
    return {name: one.token_ids for name, one in outputs.items()}


def went(said):
    """Bytes that a channel's payloads took by the device."""
    assert said[0] == "device memory"
    return int(said[1].removeprefix("closed: ").split(" ", 1)[0])


@pytest.mark.parametrize("num_stages", [2, 4])
def test_tokens_are_those_of_one_engine_through_a_consolidation(
    joined, prompts, num_stages, monkeypatch
):
    monkeypatch.setattr(growth, "COPY_BYTES", 3 * 2 * 16 * 2 * 12 * 8)
    model, pipeline, ways = joined("llama", cuts(4, num_stages), [True] * num_stages)
    outputs = consolidate(model, pipeline, prompts)
    assert outputs == {str(index): model.greedy(prompt, 60) for index, prompt in enumerate(prompts)}
    assert all(went(said) > 0 for said in ways), "hidden states, and KV back to the leader"
    assert not pipeline.lost


def test_stages_of_two_hosts_and_of_one_may_mix(joined, prompts):
    model, pipeline, ways = joined("llama", cuts(4, 4), [True, False, True, False])
    outputs = consolidate(model, pipeline, prompts)
    assert outputs == {str(index): model.greedy(prompt, 60) for index, prompt in enumerate(prompts)}
    assert [bool(said) and went(said) > 0 for said in ways] == [True, False, True, False]


def test_answers_are_longer_where_they_come_by_the_device(joined, prompts, monkeypatch):
    asked = []

    def noted(frame):
        header = unpack(frame)
        if isinstance(header, frames.KvCopied):
            asked.append(len(header.blocks))
        return header

    unpack = lead.unpack
    monkeypatch.setattr(lead, "unpack", noted)
    monkeypatch.setattr(growth, "COPY_BYTES", 2 * 16 * 2 * 12 * 8)
    for mapped, longest in ((True, 2), (False, 1)):
        asked.clear()
        model, pipeline, _ = joined("llama", cuts(4, 2), [mapped] * 2)
        consolidate(model, pipeline, prompts)
        assert (asked[0], max(asked) >= 2) == (1, longest == 2)


@pytest.mark.parametrize("device_bytes", [0, 1 << 30])
def test_kv_by_its_tokens_comes_by_the_device(devices, driver, checkpoint, prompts, device_bytes):
    model, source, target = checkpoint("llama", 1), driver(), driver()
    source.load(model)
    target.load(model)
    source.add("runs", prompts[2], max_tokens=40)
    source.finish()
    said: list[str] = []
    gives, asks = tcp_channel(16, devices(said), devices([]))
    gives.offer_device(16 * MIB)

    def find(asked, layer):
        on_device = gives.carries_device(10)
        return source.engine.shared_kv(INSTANCE, asked.token_ids, layer, on_device=on_device)

    def answers():
        with suppress(PeerLost):  # Who asks hangs up when it has all.
            answer(gives, find, 10)
        gives.close()

    thread = threading.Thread(target=answers)
    thread.start()
    asked = KvAsked(instance_id=INSTANCE, token_ids=tuple(prompts[2]))
    pieces = ask(asks, asked, RequestKey("moved", 1), lambda: 10.0, device_bytes)
    asks.close()
    thread.join(10)
    assert max(piece.layers.stop for piece in pieces) == model.spec.num_layers
    assert went(said) == sum(piece.keys_and_values.nbytes for piece in pieces) > 0
    sampling = Sampling(seed=0, max_tokens=40, temperature=0.0)
    target.engine.add("moved", 1, INSTANCE, prompts[2], (), sampling, pieces=pieces)
    target.outputs["moved"] = type(source.outputs["runs"])([])
    assert target.finish()["moved"] == source.outputs["runs"].token_ids
