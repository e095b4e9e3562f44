"""What ``make bench-engine-gpu`` does with its figures, and how it talks to engines: no device is
needed for either.
"""

import statistics
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.engine.models.quantized import dequantize, quantize

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


ENGINE = """
import sys
sys.path.insert(0, {bench!r})
import engine_gpu_job as job
answers = job.take_stdout()
print("what an engine prints on stdout")
def generate(prompts, wanted, at_once):
    return [[prompt[0]] * count for prompt, count in zip(prompts, wanted)]
def crash(ask):
    raise SystemExit(3)
job.serve(answers, {{"version": "fake"}}, generate, {{"sum": lambda ask: {{"sum": sum(ask["numbers"])}}, "crash": crash}})
"""


@pytest.fixture
def engine():
    from engine_gpu_process import Child

    command = [
        sys.executable,
        "-c",
        ENGINE.format(bench=str(BENCH)),
        '{"folder": "/tmp", "shape": "4B"}',
    ]
    with Child("fake", command, 30.0, 30.0) as child:
        yield child


def test_an_engine_is_asked_by_lines_whatever_it_prints(engine):
    assert engine.about == {"version": "fake"}
    assert engine.generate(5, [3, 4], [2, 1]) >= 0
    assert engine.ask(do="sum", numbers=[1, 2]) == {"sum": 3}


def test_an_engine_that_ends_ends_the_run(engine):
    with pytest.raises(SystemExit, match="fake ended with 3"):
        engine.ask(do="crash")


def test_prompts_have_nothing_in_common():
    from engine_gpu_job import prompts_of

    many = [
        tuple(prompt[:8]) for seed in range(1, 500, 100) for prompt in prompts_of(seed, [161] * 8)
    ]
    assert len({*many}) == len(many)
    assert prompts_of(7, [161]) == prompts_of(7, [161])


def test_a_row_has_its_ratio_and_its_floor():
    from engine_gpu import FLOOR, complaints, summary

    slow = summary(
        "decode", "ms", False, {"ours": [5.0, 4.0, 9.0], "vllm": [4.0, 4.0]}, statistics.median
    )
    assert (slow["ours"], slow["vllm"], slow["ratio"], slow["floor"]["met"]) == (
        5.0,
        4.0,
        0.8,
        False,
    )
    fast = summary("rate", "tokens/s", True, {"ours": [95.0], "vllm": [100.0]}, statistics.median)
    assert (fast["ratio"], fast["floor"]) == (0.95, {"ratio": FLOOR, "met": True})
    alone = summary("rate", "tokens/s", True, {"ours": [95.0]}, statistics.median)
    assert "ratio" not in alone
    document = {
        "rows": [slow, fast, alone],
        "left_out": ["x, round 2"],
        "agreement": {"errors": [{"prompt": 3}]},
    }
    assert complaints({"4B": document}) == [
        "4B: decode: 0.8 of vLLM, below 0.9",
        "4B: left out: x, round 2",
        "4B: tokens differ by more than rounding: {'prompt': 3}",
    ]


def test_every_row_fits_into_the_time_of_a_shape():
    from engine_gpu import EXACT_S, PREDICTED_S, PROFILE_S, rows
    from engine_gpu_job import SHAPES

    for shape in SHAPES:
        measured = sum(row.predicted_s for row in rows(shape)) * 3
        assert (
            sum(part[shape] for part in PREDICTED_S.values())
            + measured
            + PROFILE_S
            + EXACT_S[shape]
            < 260
        )


def test_fp8_is_told_beside_bfloat16():
    from engine_gpu_fp8 import below_floors, beside_bfloat16

    def rows(**figures):
        return {"rows": [{"row": "decode, batch 1", "unit": "ms", **figures}]}

    found = {
        "8B": rows(ours=4.2, vllm=4.4),
        "8B-fp8": rows(ours=2.8, vllm=3.0),
        "8B-fp8-channel": rows(ours=3.5),
    }
    lines = beside_bfloat16(found)
    assert [line["ratios"] for line in lines] == [{"ours": 1.5, "vllm": 1.4}, {"ours": 1.2}]
    assert [line["floor"]["met"] for line in lines] == [True, False]
    assert below_floors(lines) == [
        "8B-fp8-channel: decode, batch 1: 1.2 of our bfloat16, below 1.4"
    ]
    rate = {"row": "128", "unit": "tokens/s"}
    faster = {"8B": {"rows": [{**rate, "ours": 100}]}, "8B-fp8": {"rows": [{**rate, "ours": 130}]}}
    assert beside_bfloat16(faster)[0]["ratios"] == {"ours": 1.3}
    assert beside_bfloat16({"8B-fp8": rows(ours=1.0)}) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-fp8", "tiny-fp8-channel"])
def test_a_written_checkpoint_is_one_as_published(shape, tmp_path):
    from engine_gpu_job import QUANTIZED
    from engine_gpu_weights import spec_of, write

    write(shape, tmp_path)
    read = read_checkpoint(FolderSource(tmp_path)).spec
    expected = spec_of(shape)
    # An image has room between tensors.
    assert read.part_bytes == pytest.approx(expected.part_bytes, rel=0.01)
    assert (read.quantization is None) == (shape not in QUANTIZED)
    if read.quantization and expected.quantization:
        assert read.quantization.scales is expected.quantization.scales
        assert read.quantization.scale_suffix == expected.quantization.scale_suffix


def test_weights_take_what_the_shapes_say():
    from engine_gpu_job import SHAPES, weights_bytes
    from engine_gpu_weights import config_of, spec_of

    for shape in SHAPES:
        spec = spec_of(shape)
        assert 0.999 < weights_bytes(shape) / spec.total_bytes < 1
        assert config_of(spec)["num_hidden_layers"] == spec.num_layers


def test_the_sample_is_of_conversations():
    from engine_gpu import conversations
    from engine_gpu_job import KV_TOKENS, MAX_CONTEXT_TOKENS

    prompts, outputs = conversations()
    assert len(prompts) == len(outputs) == 128
    assert max(map(sum, zip(prompts, outputs, strict=True))) <= min(MAX_CONTEXT_TOKENS, KV_TOKENS)
    assert min(outputs) > 0


def test_engines_agree_up_to_rounding():
    from engine_gpu_agreement import DEVIATIONS, agreement, checked

    def tops(*values):
        return [[token, value] for token, value in enumerate(values, 1)]

    sure, close = tops(-0.1, -5.0), tops(-0.70, -0.71, -9.0)
    ours, theirs = [[1, 1, 1]] * 4, [[1, 1, 1], [1, 2, 7], [1, 2, 1], [1, 1, 9]]
    assert checked(ours, theirs) == [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]
    exact = [
        {0: sure, 1: tops(-0.1, -5.06), 2: sure},
        {0: sure, 1: tops(-0.71, -0.70, -9.0)},
        {0: close, 1: sure},
        {0: sure, 1: sure, 2: close},
    ]
    our_tops = [[sure] * 3, [sure, close, sure], [close, sure, sure], [sure, sure, close]]
    their_tops = [[sure, tops(-0.1, -5.03), sure], *our_tops[1:]]
    found = agreement(ours, theirs, our_tops, their_tops, exact)
    assert (found["equal_prompts"], found["prompts"]) == (1, 4)
    assert (found["equal_tokens"], found["compared_tokens"]) == (3 + 1 + 1 + 2, 3 + 2 + 2 + 3)
    # One gap of eight is off, by 0.06 and by 0.03; where they part counts for neither.
    assert found["rounding"] == {"ours": round(0.06 / 8**0.5, 4), "theirs": round(0.03 / 8**0.5, 4)}
    assert found["gap_bound"] == round(DEVIATIONS * 0.03 / 8**0.5, 4)
    assert [one["float32_gap"] for one in found["differing"]] == [-0.01, 4.9, None]
    assert (found["float32_prefers_ours"], found["float32_prefers_theirs"]) == (1, 1)
    assert [one["prompt"] for one in found["errors"]] == [2, 3], "far apart, and none of the best"


def test_memory_is_whose_turn_it_is():
    from engine_gpu_process import DeviceMemory

    now = 10
    memory = DeviceMemory(lambda: now)
    for name, after in (("ours", 40), ("theirs", 45), ("ours", 38), ("ours", 44)):
        with memory.of(name):
            now = after
    assert memory.peak_bytes == {"ours": 30, "theirs": 5}, "ours gave 7 back, then took 6"


def test_where_threads_are_is_told_by_ours_and_by_the_innermost_line():
    from materialize_where import Where, place_of

    with Where() as where:
        while not where.told():
            pass
    assert "MainThread" in where.told()
    frame = sys._getframe()
    assert place_of(frame).startswith("test_gpu_bench.py:"), "none of ours is in it"
    code = compile(
        "import sys\nframe = sys._getframe()", "/src/pilotlight/engine/engine.py", "exec"
    )
    names = {}
    exec(code, names)
    assert place_of(names["frame"]) == "engine.py:2 <module>"


def test_a_rounding_of_nothing_is_not_known():
    from engine_gpu_agreement import agreement

    sure = [[1, -0.1], [2, -5.0]]
    other = [[7, -0.1], [8, -5.0]]
    found = agreement([[1]], [[2]], [[sure]], [[sure]], [{0: other}])
    assert found["rounding"] == {"ours": None, "theirs": None}
    assert found["gap_bound"] is None
    assert found["errors"] == found["differing"], "nothing excuses it"


def test_logits_are_judged_by_how_far_they_are_from_what_is_meant():
    import numpy as np
    from engine_gpu import complaints
    from engine_gpu_logits import NO_WORSE, judged

    dice = np.random.default_rng(5)
    meant = dice.normal(size=(4, 3, 500)).astype(np.float32)
    noise = dice.normal(size=meant.shape).astype(np.float32)
    near, far = meant + 0.1 * noise, meant + 0.2 * np.roll(noise, 1, axis=-1)
    # Logarithms of probabilities are logits less a number for each place.
    found = judged(meant, {"ours": near + 3.0, "vllm": far - meant.max(axis=-1, keepdims=True)})
    assert found["errors"] == []
    for kind in ("prefill", "decode"):
        assert found[kind]["ours"]["relative_error"] == pytest.approx(0.1, rel=0.1)
        assert found[kind]["vllm"]["relative_error"] == pytest.approx(0.2, rel=0.1)
        assert found[kind]["between"]["relative_error"] == pytest.approx(0.05**0.5, rel=0.1)
        assert found[kind]["ours"]["kl_nats"] == pytest.approx(0.1**2 / 2, rel=0.3)
    assert judged(meant, {"ours": meant})["prefill"]["ours"] == {
        "relative_error": 0.0,
        "kl_nats": 0.0,
        "same_best": 1.0,
    }
    turned = judged(meant, {"ours": far, "vllm": near})
    assert [words.split(":")[0] for words in turned["errors"]] == ["prefill", "decode"]
    assert complaints({"8B-fp8": {"rows": [], "left_out": [], "logits": turned}})[0].endswith(
        f"above {NO_WORSE} times"
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-fp8", "tiny-fp8-channel"])
def test_what_a_checkpoint_means_is_what_transformers_computes(shape, tmp_path):
    """With weights multiplied out, and activations rounded by hooks."""
    from engine_gpu_emulated import emulated
    from engine_gpu_job import QUANTIZED, prompts_of
    from engine_gpu_weights import config_of, spec_of, write

    write(shape, tmp_path)
    spec = spec_of(shape)
    stored = {}
    for part in range(spec.num_layers + 2):
        stored |= load_file(tmp_path / f"part-{part}.safetensors")
    scales = {name: stored.pop(name) for name in [*stored] if "_scale" in name}
    for name, each in scales.items():
        weight = name.partition("_scale")[0]
        stored[weight] = dequantize(stored[weight], each, torch.float32)
    config = config_of(spec)
    config.pop("quantization_config", None)
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(config)).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})

    def rounded(module, inputs):
        group = 128 if QUANTIZED[shape] == "block" else module.in_features
        flat = inputs[0].reshape(-1, module.in_features)
        values, by_token = quantize(flat, group)
        return ((values.float() * by_token.repeat_interleave(group, dim=-1)).view_as(inputs[0]),)

    for layer in model.model.layers if scales else ():
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(rounded)
    prompts = prompts_of(3, [40, 40])
    found = emulated(tmp_path, spec, prompts, 3)
    with torch.inference_mode():
        exact = model(torch.tensor(prompts)).logits[:, -3:]
    # A value between two of fp8 may fall to the other side: sums have another order.
    assert float((found - exact).norm() / exact.norm()) < (0.02 if scales else 1e-5)
