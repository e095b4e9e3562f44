"""Placing parts: what is refused, what is converted, what is reported."""

import gc
from dataclasses import replace

import pytest
import torch

from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.memory import parameter_bytes as bytes_of
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import (
    BadCheckpoint,
    BadRequest,
    EngineError,
    NoRoom,
    UnknownInstance,
    UnsupportedModel,
)
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Dtype, Experts, Stage

I = InstanceId("i")  # noqa: E741
ROOM = 1 << 22
TOO_FEW_EXPERTS = Experts(
    num_experts=2, experts_per_token=3, intermediate_size=8, normalized=True, layers=(0,)
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def engine(clock) -> Engine:
    return Engine(1, clock, arena=CpuArena(num_slots=2, slot_bytes=1 << 30))


def changed(tensors, name, dtype=None, shape=None, buffer=None):
    old = tensors[name]
    return {
        **tensors,
        name: (dtype or old[0], shape or old[1], old[2] if buffer is None else buffer),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {name: value for name, value in t.items() if name != Q_PROJ},
            "lacks model.layers.0.self_attn.q_proj.weight",
        ),
        (lambda t: {**t, "model.layers.0.extra": t[Q_PROJ]}, "does not know"),
        (lambda t: changed(t, Q_PROJ, shape=(24, 96)), r"has shape \(24, 96\)"),
        (lambda t: changed(t, Q_PROJ, dtype=Dtype.FLOAT32), "stored as float32"),
        (lambda t: changed(t, Q_PROJ, buffer=t[Q_PROJ][2][:-8]), "bytes instead of"),
    ],
)
def test_a_wrong_part_is_refused_and_frees_the_stage(change, message, engine, checkpoint):
    model = checkpoint("llama")
    engine.begin_load(I, model.spec, model.spec.whole, Dtype.FLOAT64, ROOM)
    engine.place_part(I, 0, model.parts[0])
    with pytest.raises(BadCheckpoint, match=message) as refused:
        engine.place_part(I, 1, change(model.parts[1]))
    assert refused.value.code == "bad_checkpoint"
    with pytest.raises(UnknownInstance):
        engine.place_part(I, 1, model.parts[1])
    engine.begin_load(I, model.spec, model.spec.whole, Dtype.FLOAT64, ROOM)


def test_a_part_of_another_stage_is_refused(engine, checkpoint):
    model = checkpoint("llama")
    engine.begin_load(I, model.spec, Stage(0, 2), Dtype.FLOAT64, ROOM)
    with pytest.raises(BadRequest, match="part 3"):
        engine.place_part(I, 3, model.parts[3])
    assert [engine.place_part(I, part, model.parts[part]).ready for part in (0, 1, 2)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"architecture": "GPT2LMHeadModel"}, UnsupportedModel, "unsupported_model"),
        ({"num_kv_heads": 3}, UnsupportedModel, "unsupported_model"),
        ({"head_dim": 13}, UnsupportedModel, "unsupported_model"),
        ({"sliding_layers": (0,)}, UnsupportedModel, "unsupported_model"),
        ({"experts": TOO_FEW_EXPERTS}, UnsupportedModel, "unsupported_model"),
        ({"num_layers": 3, "part_bytes": (0,) * 5}, BadRequest, "invalid_request"),
    ],
)
def test_refused_models(change, error, code, engine, checkpoint):
    spec = replace(checkpoint("llama").spec, **change)
    with pytest.raises(error) as refused:
        engine.begin_load(I, spec, Stage(0, 4), Dtype.FLOAT64, ROOM)
    assert refused.value.code == code


def test_an_instance_is_held_once(engine, checkpoint):
    spec = checkpoint("llama").spec
    engine.begin_load(I, spec, spec.whole, Dtype.FLOAT64, ROOM)
    with pytest.raises(BadRequest, match="held already"):
        engine.begin_load(I, spec, spec.whole, Dtype.FLOAT64, ROOM)


@pytest.mark.parametrize("stage", [Stage(0, 4), Stage(0, 2), Stage(2, 4)])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.BFLOAT16])
def test_device_bytes_are_parameters_and_kv(stage, dtype, engine, checkpoint):
    spec = checkpoint("llama-tied").spec
    per_token = spec.kv_bytes_per_token(stage, dtype)
    parameter_bytes = bytes_of(decoder_of(spec), stage, dtype)
    stored = sum(
        len(buffer)
        for part in spec.parts_of(stage)
        for _, _, buffer in checkpoint("llama-tied").parts[part].values()
    )
    assert parameter_bytes == stored * dtype.size_bytes // 8
    room = engine.begin_load(I, spec, stage, dtype, parameter_bytes + 100 * per_token)
    assert (room.parts, room.parameter_bytes, room.kv_bytes_per_token) == (
        spec.parts_of(stage),
        parameter_bytes,
        per_token,
    )
    assert room.kv_capacity_tokens == 96, "whole blocks of 16"
    engine.unload(I)
    for too_little in (parameter_bytes + 16 * per_token - 1, parameter_bytes - 1, 0):
        with pytest.raises(NoRoom):
            engine.begin_load(I, spec, stage, dtype, too_little)


def test_a_device_that_refuses_the_memory_is_no_room(engine, checkpoint):
    spec = checkpoint("llama").spec
    with pytest.raises(NoRoom, match="refuses"):
        engine.begin_load(I, spec, spec.whole, Dtype.FLOAT64, 1 << 60)


def test_copying_and_converting_are_timed_apart(engine, checkpoint):
    model = checkpoint("llama")
    engine.begin_load(I, model.spec, model.spec.whole, Dtype.FLOAT64, ROOM)
    plain = engine.place_part(I, 1, model.parts[1])
    assert (plain.copy_s, plain.convert_s) == (
        pytest.approx(0.001),
        0.0,
    )  # the clock is looked at twice
    again = engine.place_part(I, 1, model.parts[1])
    assert (again.copy_s, again.convert_s, again.ready) == (0.0, 0.0, False)
    engine.unload(I)
    engine.begin_load(I, model.spec, model.spec.whole, Dtype.FLOAT32, ROOM)
    converted = engine.place_part(I, 1, model.parts[1])
    num_tensors = len(model.parts[1])
    assert converted.convert_s == pytest.approx(0.001 * num_tensors)
    assert converted.copy_s == pytest.approx(0.001 * (num_tensors + 1))


def test_tensors_are_copied_from_unaligned_read_only_buffers_and_converted(checkpoint, clock):
    model = checkpoint("qwen2", 0, Dtype.BFLOAT16)
    memory = StageMemory(CpuArena(), decoder_of(model.spec), model.spec.whole, Dtype.FLOAT32)
    parameters = Parameters(memory)
    file = bytearray(b"?")
    places = {}
    for name, (dtype, shape, buffer) in model.parts[2].items():
        places[name] = (dtype, shape, len(file), len(buffer))
        file += buffer
    view = memoryview(file).toreadonly()
    tensors = {
        name: (dtype, shape, view[start : start + size])
        for name, (dtype, shape, start, size) in places.items()
    }
    parameters.place(2, tensors, clock)
    file[:] = b"\xff" * len(file)
    for name, expected in model.model.model.layers[1].state_dict().items():
        torch.testing.assert_close(parameters[2][name], expected.float(), rtol=0, atol=0)


def test_conversion_gives_the_tokens_of_a_converted_checkpoint(checkpoint, driver, prompts):
    narrow = checkpoint("llama", 1, Dtype.BFLOAT16)
    runs = driver()
    runs.load(narrow, dtype=Dtype.FLOAT64)
    runs.add("a", prompts[1])
    outputs = runs.finish()
    assert outputs["a"] == narrow.converted(Dtype.FLOAT64).greedy(prompts[1], 24)


def test_unload_frees_the_memory(checkpoint, driver, prompts):
    def held() -> int:
        gc.collect()
        return sum(type(thing) in (Parameters, KvCache) for thing in gc.get_objects())

    runs, before = driver(), held()
    runs.load(checkpoint("llama"))
    runs.add("a", prompts[0])
    runs.step()
    assert held() == before + 2
    runs.engine.drop(I)
    assert held() == before
    assert runs.engine.backed_bytes == 0
    runs.engine.unload(I)


def test_every_error_has_its_code_of_the_taxonomy():
    def tree(kind):
        return {
            kind: kind.code,
            **{k: v for child in kind.__subclasses__() for k, v in tree(child).items()},
        }

    assert set(tree(EngineError).values()) == {
        "invalid_request",
        "context_length_exceeded",
        "unsupported_model",
        "bad_checkpoint",
        "no_room",
        "not_loaded",
        "deadline_exceeded",
        "conflict",
        "worker_lost",
        "peer_refused",
        "queue_full",
        "engine_failed",
        "restore_failed",
    }
