"""Models with fp8 weights on the CPU against transformers with the same weights multiplied out and
activations rounded by hooks: exact but for the order of sums.
"""

from types import SimpleNamespace

import pytest
import torch
from fp8_models import FORMATS, MODELS, quantized_model
from random_models import source_of

from pilotlight.engine.core.batch import Segment
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.memory import StageMemory, parameter_bytes
from pilotlight.engine.errors import BadCheckpoint
from pilotlight.engine.models.quantized import SMALLEST, dequantize, quantize
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo, Stage

NO_WORSE = 1.2
"""How much further from float64 than transformers in bfloat16 the engine may be: values that lie
between two of fp8 fall to either side in either of them."""
STARTS = range(0, 70, 5)


def error(found, exact):
    """Relative to the whole."""
    return float((found.double() - exact).norm() / exact.norm())


def offered(quantized):
    """As a loader offers it, for ``chain`` and ``driver``."""
    parts = [
        {name: source_of(tensor) for name, tensor in part.items()} for part in quantized.parts()
    ]
    return SimpleNamespace(spec=quantized.spec, parts=dict(enumerate(parts)))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("ranges", [1, 2])
def test_logits_are_those_of_transformers(kind, form, ranges, chain, prompts):
    quantized = quantized_model(kind, form, Dtype.FLOAT64)
    whole = chain(offered(quantized), ranges, 16)
    prompt = prompts[2]
    found = whole.run([Segment(0, len(prompt), (9, 2, 14, 5, 11), True)], prompt)
    torch.testing.assert_close(found[-1], quantized.logits(prompt)[-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale_dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_in_bfloat16_logits_are_close(form, scale_dtype, chain, prompts):
    quantized = quantized_model("qwen3", form, Dtype.BFLOAT16, scale_dtype)
    whole, prompt, blocks = chain(offered(quantized), 1, 16), prompts[2], (9, 2, 14, 5, 11)
    rows = [whole.run([Segment(at, 5, blocks, True)], prompt[at : at + 5]) for at in STARTS]
    ends = [at + 4 for at in STARTS]
    exact, theirs = (model.logits(prompt)[ends] for model in (quantized.widened(), quantized))
    assert error(torch.cat(rows), exact) < NO_WORSE * error(theirs, exact)


@pytest.mark.parametrize("form", ["fp8-block", "fp8-tensor"])
def test_greedy_tokens_equal_transformers(form, driver, prompts):
    quantized = quantized_model("qwen3", form, Dtype.FLOAT64)
    runs = driver()
    runs.load(offered(quantized))
    for index, prompt in enumerate(prompts):
        runs.add(str(index), prompt, max_tokens=24)
    for index, output in runs.finish().items():
        prompt = prompts[int(index)]
        logits = quantized.logits([*prompt, *output])[len(prompt) - 1 : -1]
        assert output == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("scale_dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
def test_the_books_have_room_for_what_lies_on_a_device(form, dtype, scale_dtype):
    spec = quantized_model("llama", form, Dtype.BFLOAT16, scale_dtype).spec
    model = Model(
        name=ModelName("m"),
        uri="",
        revision=None,
        source_version="",
        digest=Digest("d"),
        text_digest=Digest("t"),
        dtype=dtype,
        spec=spec,
        slo=Slo(ttft_ms=1, tpot_ms=1),
        scaling=ScalingBounds(),
    )
    for stage in (spec.whole, Stage(0, 2), Stage(2, 4)):
        held_bytes = parameter_bytes(decoder_of(spec), stage, dtype)
        assert held_bytes <= model.device_bytes(stage) <= held_bytes * 1.01


def test_weights_stay_in_fp8_whatever_the_engine_computes_in(checkpoint):
    quantized = quantized_model("qwen3", "fp8-block", Dtype.BFLOAT16)
    decoder = decoder_of(quantized.spec)
    memory = StageMemory(
        CpuArena(num_slots=1, slot_bytes=1 << 30), decoder, quantized.spec.whole, Dtype.FLOAT32
    )
    tensors, packs = memory.tensors(1), memory.packs(1)
    assert tensors["self_attn.q_proj.weight"].dtype is torch.float8_e4m3fn
    assert tensors["input_layernorm.weight"].dtype is torch.float32
    qkv, scales = (packs[f"self_attn.qkv_proj.{name}"] for name in ("weight", "weight_scale_inv"))
    assert (qkv.shape, scales.shape) == ((512, 256), (4, 2))
    assert tensors["self_attn.v_proj.weight"].data_ptr() == qkv[384:].data_ptr()
    assert tensors["self_attn.v_proj.weight_scale_inv"].data_ptr() == scales[3:].data_ptr()


def test_a_part_without_its_scales_is_refused(driver):
    quantized = offered(quantized_model("llama", "compressed-channel", Dtype.BFLOAT16))
    del quantized.parts[1]["model.layers.0.mlp.down_proj.weight_scale"]
    with pytest.raises(BadCheckpoint, match=r"down_proj\.weight_scale"):
        driver().load(quantized)


def test_a_group_of_zeros_stays_zeros():
    x = torch.zeros(2, 256)
    x[1, 128:] = 3.0
    values, scales = quantize(x, 128)
    assert torch.equal(values.float() * scales.repeat_interleave(128, dim=1), x)
    assert float(scales[0, 0]) == pytest.approx(SMALLEST / 448.0)


def test_scales_of_blocks_end_with_the_weight():
    weight = torch.ones(200, 130).to(torch.float8_e4m3fn)
    found = dequantize(weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.float32)
    assert found.shape == (200, 130)
    assert [float(found[place]) for place in ((0, 0), (0, 128), (128, 127), (199, 129))] == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]
