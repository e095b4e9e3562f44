"""Which quantized checkpoints are served, what their tensors are, and how others are refused."""

import json
from copy import deepcopy

import pytest
from fp8_models import FORMATS

from pilotlight.checkpoint.architectures import expected_dtype, expected_parts
from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.config import declared_dtype, parse_config
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel
from pilotlight.checkpoint.manifest import decode, encode
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.checkpoint.safetensors import SINGLE_FILE
from pilotlight.checkpoint.testing import encode_safetensors, tiny_config, tiny_files
from pilotlight.policy.model import Dtype, ScaleKind

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
LAYER = "model.layers.0."


def config_of(form, architecture="Qwen3ForCausalLM", **changes):
    return tiny_config(architecture, **{**SIZES, "quantization_config": FORMATS[form], **changes})


def spec_of(config, scale_dtype=None):
    return parse_config(json.dumps(config).encode(), Dtype.BFLOAT16, scale_dtype)


def changed(form, *path, value):
    """A format with one value changed."""
    config = deepcopy(FORMATS[form])
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


@pytest.mark.parametrize(
    ("form", "kind", "suffix", "shape"),
    [
        ("fp8-block", ScaleKind.BLOCK, "weight_scale_inv", (3, 2)),
        ("fp8-tensor", ScaleKind.TENSOR, "weight_scale", (1,)),
        ("compressed-channel", ScaleKind.CHANNEL, "weight_scale", (384, 1)),
        ("compressed-tensor", ScaleKind.TENSOR, "weight_scale", (1,)),
        ("compressed-block", ScaleKind.BLOCK, "weight_scale", (3, 2)),
    ],
)
def test_a_published_format_has_a_scale_for_each_projection(form, kind, suffix, shape):
    spec = spec_of(config_of(form), Dtype.BFLOAT16)
    assert spec.quantization is not None
    assert spec.quantization.scales is kind
    part = expected_parts(spec)[1]
    scales = [name for name in part if "scale" in name]
    assert len(scales) == 7
    assert part[f"{LAYER}mlp.up_proj.{suffix}"] == shape
    dtypes = {name: expected_dtype(spec, name) for name in part}
    assert {name for name, dtype in dtypes.items() if dtype is Dtype.FLOAT8} == {
        name for name in part if name.endswith("_proj.weight")
    }
    assert dtypes[f"{LAYER}self_attn.q_norm.weight"] is Dtype.BFLOAT16
    assert not any("scale" in name for number in (0, 3) for name in expected_parts(spec)[number])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_whole_checkpoint_is_read(form, shards, tmp_path):
    for name, content in tiny_files(config_of(form, torch_dtype="bfloat16"), shards=shards).items():
        (tmp_path / name).write_bytes(content)
    checkpoint = read_checkpoint(FolderSource(tmp_path))
    spec = checkpoint.spec
    assert (spec.dtype, checkpoint.run_dtype) == (Dtype.BFLOAT16, Dtype.BFLOAT16)
    assert spec.quantization is not None
    # Of a layer's bytes all but three norms and two head norms stay as they are stored.
    kept = spec.quantization.stored_bytes
    assert spec.part_bytes[1] - kept[1] == 2 * (2 * 256 + 2 * 64)
    assert (kept[0], kept[3]) == (0, 0)
    manifest = decode(encode(checkpoint.manifest))
    assert manifest.digest() == checkpoint.manifest.digest()
    stored = {tensor.name: tensor.dtype for part in manifest.parts for tensor in part.tensors}
    assert stored[f"{LAYER}mlp.down_proj.weight"] is Dtype.FLOAT8
    assert stored["lm_head.weight"] is Dtype.BFLOAT16


def test_scales_may_be_stored_in_either_dtype_but_not_in_both(tmp_path):
    config = config_of("fp8-block")
    files = tiny_files(config)
    spec = spec_of(config)
    names = {name: shape for part in expected_parts(spec) for name, shape in part.items()}
    others = {name: expected_dtype(spec, name) for name in names}
    scales = [name for name in names if name.endswith("_scale_inv")]
    for narrow in (scales, scales[:1]):
        mixed = others | dict.fromkeys(narrow, Dtype.BFLOAT16)
        files[SINGLE_FILE] = encode_safetensors(names.items(), others=mixed)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        if narrow is scales:
            quantization = read_checkpoint(FolderSource(tmp_path)).spec.quantization
            assert quantization is not None
            assert quantization.scale_dtype is Dtype.BFLOAT16
        else:
            with pytest.raises(UnsupportedModel, match="by quantization_config"):
                read_checkpoint(FolderSource(tmp_path))


def test_a_scale_of_a_tensor_may_be_a_number(tmp_path):
    config = config_of("fp8-tensor")
    spec = spec_of(config)
    names = {name: shape for part in expected_parts(spec) for name, shape in part.items()}
    others = {name: expected_dtype(spec, name) for name in names}
    bare = {name: () if name.endswith("_scale") else shape for name, shape in names.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / SINGLE_FILE).write_bytes(encode_safetensors(bare.items(), others=others))
    manifest = read_checkpoint(FolderSource(tmp_path)).manifest
    shapes = {tensor.name: tensor.shape for part in manifest.parts for tensor in part.tensors}
    assert shapes[f"{LAYER}mlp.up_proj.weight_scale"] == (1,)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (f"{LAYER}mlp.down_proj.weight", Dtype.BFLOAT16),
        ("lm_head.weight", Dtype.FLOAT8),
        (f"{LAYER}input_layernorm.weight", Dtype.FLOAT8),
    ],
)
def test_what_is_quantized_has_to_be_what_is_served(name, dtype, tmp_path):
    config = config_of("compressed-channel")
    spec = spec_of(config)
    names = {name: shape for part in expected_parts(spec) for name, shape in part.items()}
    others = {one: expected_dtype(spec, one) for one in names} | {name: dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / SINGLE_FILE).write_bytes(encode_safetensors(names.items(), others=others))
    with pytest.raises(UnsupportedModel, match=rf"{name}.*by quantization_config it should be"):
        read_checkpoint(FolderSource(tmp_path))


def test_fp8_weights_without_a_word_in_the_configuration_are_refused(tmp_path):
    config = config_of("fp8-block")
    files = tiny_files(config)
    del config["quantization_config"]
    files["config.json"] = json.dumps(config).encode()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadCheckpoint, match="weight_scale_inv"):
        read_checkpoint(FolderSource(tmp_path))


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"bits": 4}, "quant_method (none)"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method gptq"),
        (changed("fp8-block", "activation_scheme", value="static"), "activation_scheme static"),
        (changed("fp8-block", "fmt", value="e5m2"), "fmt e5m2"),
        (changed("fp8-block", "scale_fmt", value="ue8m0"), "scale_fmt ue8m0"),
        (changed("fp8-block", "weight_block_size", value=[64, 64]), "weight_block_size"),
        (changed("compressed-channel", "format", value="pack-quantized"), "pack-quantized"),
        (changed("compressed-channel", "kv_cache_scheme", value={"num_bits": 8}), "kv_cache"),
        (changed("compressed-channel", "config_groups", value={}), "config_groups"),
        (changed("compressed-channel", *GROUP, "targets", value=["re:.*mlp.*"]), "targets"),
        (changed("compressed-channel", *GROUP, "input_activations", value=None), "both"),
        (changed("compressed-channel", *GROUP, "weights", "num_bits", value=4), "4 bits"),
        (changed("compressed-channel", *GROUP, "weights", "type", value="int"), "int"),
        (changed("compressed-channel", *GROUP, "weights", "symmetric", value=False), "zero points"),
        (changed("compressed-channel", *GROUP, "weights", "strategy", value="group"), "group"),
        (
            changed("compressed-channel", *GROUP, "input_activations", "dynamic", value=False),
            "static",
        ),
        (
            changed("compressed-channel", *GROUP, "input_activations", "strategy", value="tensor"),
            "activations by tensor beside weights by channel",
        ),
        (
            changed("compressed-block", *GROUP, "weights", "block_structure", value=[1, 128]),
            "block_structure",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(quantization, named):
    with pytest.raises(
        UnsupportedModel, match=r"^(config\.json: )?quantization_config: "
    ) as caught:
        spec_of(config_of("fp8-block", quantization_config=quantization))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 200}, "hidden_size"),
        ({"intermediate_size": 400}, "intermediate_size"),
        ({"head_dim": 16}, "num_attention_heads"),
        ({"head_dim": 32}, "num_key_value_heads"),
    ],
)
def test_blocks_lie_within_projections(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        spec_of(config_of("fp8-block", **changes))
    spec_of(config_of("compressed-channel", **changes))


def test_fp8_is_no_dtype_to_compute_in():
    data = json.dumps(tiny_config(torch_dtype="float8_e4m3fn")).encode()
    with pytest.raises(UnsupportedModel, match="none of bfloat16"):
        declared_dtype(data)
