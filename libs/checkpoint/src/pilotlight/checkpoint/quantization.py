"""``quantization_config`` to ``Quantization``.

Two ways to publish fp8 weights are served; both quantize activations as they come::

    quant_method        scales                          written by
    fp8                 weight_scale_inv by block,      DeepSeek's and Qwen's FP8 releases
                        or weight_scale by tensor
    compressed-tensors  weight_scale by row, block or   llm-compressor, as "FP8-dynamic"
                        tensor (format float-quantized)

Which tensors are quantized is not read from lists of exceptions: every projection of a layer has to
be, and nothing else may be; ``build_manifest`` compares that with what is stored.
"""

from dataclasses import replace

from pilotlight.checkpoint.errors import UnsupportedModel, quote
from pilotlight.checkpoint.strict_json import CONFIG_FILE, JsonObject
from pilotlight.policy.model import SCALE_BLOCK, Dtype, ModelSpec, Quantization, ScaleKind

_BITS = 8
_STRATEGIES = {
    "channel": ScaleKind.CHANNEL,
    "block": ScaleKind.BLOCK,
    "tensor": ScaleKind.TENSOR,
}
_ACTIVATIONS = {
    ScaleKind.CHANNEL: "token",
    ScaleKind.TENSOR: "token",
    ScaleKind.BLOCK: "group",
}


def parse_quantization(config: JsonObject, scale_dtype: Dtype | None) -> Quantization | None:
    """What the configuration says of quantized weights; None: there are none.

    Args:
        config: the whole configuration.
        scale_dtype: the element type of the stored scales, if there are any.

    Raises:
        BadCheckpoint: a value is missing or of the wrong type.
        UnsupportedModel: the weights are quantized in a way that is not served.
    """
    said = config.child("quantization_config")
    if said is None:
        return None
    method = said.text("quant_method", default="(none)")
    if method == "fp8":
        found = _fp8(said)
    elif method == "compressed-tensors":
        found = _compressed_tensors(said)
    else:
        raise _refused(
            f"quant_method {quote(method)} is not supported, only fp8 and compressed-tensors"
        )
    return found if scale_dtype is None else replace(found, scale_dtype=scale_dtype)


def check_blocks(spec: ModelSpec) -> None:
    """Raises ``UnsupportedModel`` where scales by block would lie across projections that are
    computed as one.
    """
    if spec.quantization is None or spec.quantization.scales is not ScaleKind.BLOCK:
        return
    widths = {
        "hidden_size": spec.hidden_size,
        "num_attention_heads * head_dim": spec.num_heads * spec.head_dim,
        "num_key_value_heads * head_dim": spec.num_kv_heads * spec.head_dim,
        "intermediate_size": spec.intermediate_size,
    }
    if spec.experts is not None:
        widths["moe_intermediate_size"] = spec.experts.intermediate_size
    for name, width in widths.items():
        if width % SCALE_BLOCK:
            raise _refused(
                f"scales by block need {name} to be a multiple of {SCALE_BLOCK}, not {width}"
            )


def _fp8(said: JsonObject) -> Quantization:
    _dynamic(said.text("activation_scheme", default="dynamic"))
    if (fmt := said.text("fmt", default="e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"fmt {quote(fmt)} is not supported, only e4m3")
    if (scale_fmt := said.text("scale_fmt", default="float")) != "float":
        raise _refused(f"scale_fmt {quote(scale_fmt)} is not supported, only float")
    if not said.has("weight_block_size"):
        return Quantization(
            scales=ScaleKind.TENSOR, scale_dtype=Dtype.FLOAT32, scale_suffix="weight_scale"
        )
    _block(said, "weight_block_size")
    return Quantization(
        scales=ScaleKind.BLOCK, scale_dtype=Dtype.FLOAT32, scale_suffix="weight_scale_inv"
    )


def _compressed_tensors(said: JsonObject) -> Quantization:
    if (form := said.text("format", default="(none)")) != "float-quantized":
        raise _refused(f"format {quote(form)} is not supported, only float-quantized")
    if said.has("kv_cache_scheme"):
        raise _refused("kv_cache_scheme is not supported: KV is held in the model's dtype")
    groups = said.child("config_groups")
    names = groups.names() if groups is not None else ()
    group = groups.child(names[0]) if groups is not None and len(names) == 1 else None
    if group is None:
        raise _refused("config_groups does not hold one group, which is what is supported")
    if list(group.items("targets")) != ["Linear"]:
        raise _refused("targets is not [Linear], which is what is supported")
    weights, activations = group.child("weights"), group.child("input_activations")
    if weights is None or activations is None:
        raise _refused("weights and input_activations have to be quantized both")
    for scheme in (weights, activations):
        bits, kind = scheme.integer("num_bits", 1, 64), scheme.text("type", default="int")
        if (bits, kind) != (_BITS, "float"):
            raise _refused(f"{bits} bits of type {quote(kind)} are not supported, only fp8")
        if not scheme.flag("symmetric", default=True):
            raise _refused("zero points are not supported: symmetric is false")
    strategy = weights.text("strategy", default="tensor")
    if strategy not in _STRATEGIES:
        raise _refused(
            f"strategy {quote(strategy)} is not supported, only {', '.join(_STRATEGIES)}"
        )
    scales = _STRATEGIES[strategy]
    if scales is ScaleKind.BLOCK:
        _block(weights, "block_structure")
    if activations.raw("dynamic") is not True:
        _dynamic("static")
    if (strategy := activations.text("strategy", default="token")) != _ACTIVATIONS[scales]:
        raise _refused(
            f"activations by {quote(strategy)} beside weights by {scales} are not supported"
        )
    if scales is ScaleKind.BLOCK:
        activations.integer("group_size", SCALE_BLOCK, SCALE_BLOCK)
    return Quantization(scales=scales, scale_dtype=Dtype.FLOAT32, scale_suffix="weight_scale")


def _dynamic(scheme: str) -> None:
    if scheme != "dynamic":
        raise _refused(
            f"activation_scheme {quote(scheme)} is not supported, only dynamic: activations are quantized as they come"
        )


def _block(said: JsonObject, name: str) -> None:
    if list(said.items(name)) != [SCALE_BLOCK, SCALE_BLOCK]:
        raise _refused(f"{name} is not [{SCALE_BLOCK}, {SCALE_BLOCK}], which is what is supported")


def _refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"quantization_config: {what}", file=CONFIG_FILE)
