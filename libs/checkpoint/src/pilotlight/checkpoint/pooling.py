"""How a checkpoint says that it makes vectors or scores: ``modules.json`` and what it names, as
sentence-transformers writes them, or settings of ``config.json``.
"""

from collections.abc import Collection, Mapping
from typing import cast

from pilotlight.checkpoint.encoders import ENCODERS
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel, quote
from pilotlight.checkpoint.folders import POOLING_FILE
from pilotlight.checkpoint.reader import Source, SourceFile, read_small
from pilotlight.checkpoint.strict_json import CONFIG_FILE, MAX_CONFIG_BYTES, JsonObject
from pilotlight.policy.pooling import Pooling, PoolingMode, Task

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
POOLING_FILES = (MODULES_FILE, POOLING_FILE, LENGTH_FILE)
MAX_TEXT_TOKENS = 1 << 27
MAX_DIMENSIONS = 64

BACKBONES: Mapping[str, str] = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}
"""Decoders without a head, as they are saved when they are trained to make vectors."""

_MODES = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}
_NAMED = {"cls": PoolingMode.CLS, "mean": PoolingMode.MEAN, "lasttoken": PoolingMode.LAST}
_SIGMOID, _IDENTITY = "Sigmoid", "Identity"


def read_pooling_files(source: Source, files: Mapping[str, SourceFile]) -> dict[str, bytes]:
    """The small files that say it, those that are there."""
    return {
        name: read_small(source, files[name], MAX_CONFIG_BYTES)
        for name in POOLING_FILES
        if name in files
    }


def parse_pooling(
    config: JsonObject, architecture: str, said: Mapping[str, bytes]
) -> Pooling | None:
    """How a checkpoint's states become vectors or scores; None: it generates text.

    Args:
        config: its ``config.json``.
        architecture: that of the configuration.
        said: the content of ``POOLING_FILES``, as far as they are there.

    Raises:
        BadCheckpoint: a value is missing, of the wrong type or out of bounds.
        UnsupportedModel: it makes its vectors in a way that no engine here computes.
    """
    family = ENCODERS.get(architecture)
    if family is not None and family.scores:
        return _classifier(config)
    if config.has("classifier_from_token"):
        return _by_answers(config)
    if MODULES_FILE not in said and POOLING_FILE not in said:
        if family is None and architecture not in BACKBONES:
            return None
        raise UnsupportedModel(
            f"{architecture} makes vectors, and there is no {MODULES_FILE} or {POOLING_FILE} that says how",
            file=CONFIG_FILE,
        )
    if POOLING_FILE not in said:
        raise BadCheckpoint(f"there is no {POOLING_FILE}, which {MODULES_FILE} needs")
    mode = _mode(JsonObject.parse(said[POOLING_FILE], POOLING_FILE))
    if family is None and mode is PoolingMode.CLS:
        raise UnsupportedModel(
            "the first token of a decoder sees no other: cls pooling is not supported",
            file=POOLING_FILE,
        )
    if family is not None and mode is PoolingMode.LAST:
        raise UnsupportedModel(
            "the last token of a text is none that an encoder was trained for: lasttoken pooling is not supported",
            file=POOLING_FILE,
        )
    modules = _modules(said[MODULES_FILE]) if MODULES_FILE in said else ()
    return Pooling(mode=mode, normalize="Normalize" in modules, dimensions=_dimensions(config))


def text_tokens(said: Mapping[str, bytes], context_tokens: int) -> int:
    """Most tokens of a text: the model's, or fewer where sentence-transformers is told so."""
    if LENGTH_FILE not in said:
        return context_tokens
    length = JsonObject.parse(said[LENGTH_FILE], LENGTH_FILE)
    most = length.integer("max_seq_length", 1, MAX_TEXT_TOKENS, default=context_tokens)
    return min(context_tokens, most)


def _mode(pooling: JsonObject) -> PoolingMode:
    if pooling.has("pooling_mode"):
        name = pooling.text("pooling_mode")
        if name not in _NAMED:
            raise UnsupportedModel(
                f"pooling_mode {quote(name)} is not supported", file=POOLING_FILE
            )
        return _NAMED[name]
    chosen = [
        name
        for name in pooling.names()
        if name.startswith("pooling_mode_") and pooling.flag(name, default=False)
    ]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise UnsupportedModel(
            f"pooling by {', '.join(map(quote, chosen)) or 'nothing'} is not supported, only by one of {', '.join(_MODES)}",
            file=POOLING_FILE,
        )
    return _MODES[chosen[0]]


def _modules(data: bytes) -> tuple[str, ...]:
    """Names of the modules behind the transformer, in order."""
    wrapped = JsonObject.parse(b'{"modules":' + data + b"}", MODULES_FILE)
    names: list[str] = []
    for module in wrapped.items("modules"):
        fields = cast("dict[str, object]", module) if isinstance(module, dict) else {}
        names.append(str(fields.get("type", "")).rpartition(".")[2])
    strange = [name for name in names if name not in ("Transformer", "Pooling", "Normalize")]
    if strange:
        raise UnsupportedModel(
            f"the module {quote(strange[0])} is not supported", file=MODULES_FILE
        )
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(f"the modules {', '.join(names)}, in this order", file=MODULES_FILE)
    return tuple(names)


def _dimensions(config: JsonObject) -> tuple[int, ...]:
    lengths = config.items("matryoshka_dimensions")
    if len(lengths) > MAX_DIMENSIONS or any(
        type(length) is not int or length < 1 for length in lengths
    ):
        raise config.fault("matryoshka_dimensions", "is not a short list of positive integers")
    return tuple(lengths)


def _classifier(config: JsonObject) -> Pooling:
    labels = config.child("id2label")
    count = config.integer(
        "num_labels", 1, MAX_TEXT_TOKENS, default=len(labels.names()) if labels else 2
    )
    if count != 1:
        raise UnsupportedModel(
            f"a classifier of {count} labels is not supported, only a cross-encoder's of one",
            file=CONFIG_FILE,
        )
    inside = config.child("sentence_transformers")
    name = config.text("sbert_ce_default_activation_function", default=_SIGMOID)
    if inside is not None:
        name = inside.text("activation_fn", default=name)
    kind = name.rpartition(".")[2]
    if kind not in (_SIGMOID, _IDENTITY):
        raise UnsupportedModel(f"scores by {quote(name)} are not supported", file=CONFIG_FILE)
    return Pooling(mode=PoolingMode.CLS, task=Task.SCORE, sigmoid=kind == _SIGMOID)


def _by_answers(config: JsonObject) -> Pooling:
    answers: Collection[object] = config.items("classifier_from_token")
    texts = tuple(answer for answer in answers if isinstance(answer, str) and answer)
    if len(texts) != 2 or len(answers) != 2:
        raise config.fault("classifier_from_token", "does not name two tokens")
    return Pooling(mode=PoolingMode.LAST, task=Task.SCORE, sigmoid=True, answers=texts)
