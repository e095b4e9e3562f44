"""Which encoders are supported: the tensors of each part.

Layers are post-norm (Devlin et al. 2019, section 3). The second norm of the last layer lies in the
head, so that an encoder ends, as a decoder does, with a final norm::

    part 0       embeddings: words, positions, types, norm
    part 1 + l   layer l, without its second norm if it is the last
    head         that norm, and the classifier of a cross-encoder
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pilotlight.policy.model import ModelSpec
from pilotlight.policy.pooling import EncoderSpec, Task

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """One architecture."""

    prefix: str
    """Before the names of all but the classifier's tensors; backbones alone have none."""
    scores: bool
    """It has a classifier, which makes it a cross-encoder."""
    padded_positions: bool = False
    """Positions count from behind the padding token's id."""


_ROBERTA = EncoderFamily(prefix="roberta.", scores=False, padded_positions=True)
_ROBERTA_SCORES = EncoderFamily(prefix="roberta.", scores=True, padded_positions=True)
ENCODERS: Mapping[str, EncoderFamily] = MappingProxyType(
    {
        "BertModel": EncoderFamily(prefix="bert.", scores=False),
        "BertForSequenceClassification": EncoderFamily(prefix="bert.", scores=True),
        "RobertaModel": _ROBERTA,
        "RobertaForSequenceClassification": _ROBERTA_SCORES,
        "XLMRobertaModel": _ROBERTA,
        "XLMRobertaForSequenceClassification": _ROBERTA_SCORES,
    }
)
WORDS = "embeddings.word_embeddings.weight"
_UNUSED = re.compile(r"embeddings\.(position_ids|token_type_ids)|pooler\.dense\.(weight|bias)")


def encoder_parts(spec: ModelSpec, encoder: EncoderSpec) -> tuple[dict[str, Shape], ...]:
    """As ``expected_parts``."""
    width, prefix = spec.hidden_size, spec.tensor_prefix
    embeddings = {
        WORDS: (spec.vocab_size, width),
        "embeddings.position_embeddings.weight": (encoder.num_positions, width),
        "embeddings.token_type_embeddings.weight": (encoder.num_types, width),
        **_norm("embeddings.LayerNorm", width),
    }
    layers = [
        {f"encoder.layer.{layer}.{name}": shape for name, shape in _layer(spec, layer)}
        for layer in range(spec.num_layers)
    ]
    norm = _norm(f"encoder.layer.{spec.num_layers - 1}.output.LayerNorm", width)
    return (
        *({prefix + name: shape for name, shape in part.items()} for part in (embeddings, *layers)),
        {**{prefix + name: shape for name, shape in norm.items()}, **classifier(spec)},
    )


def classifier(spec: ModelSpec) -> dict[str, Shape]:
    """Tensors of a cross-encoder's classifier by their names in the checkpoint; of others none."""
    width = spec.hidden_size
    if spec.task is not Task.SCORE:
        return {}
    if ENCODERS[spec.architecture].padded_positions:
        return {
            **_linear("classifier.dense", width, width),
            **_linear("classifier.out_proj", 1, width),
        }
    return {
        **_linear(f"{spec.tensor_prefix}pooler.dense", width, width),
        **_linear("classifier", 1, width),
    }


def is_encoder_buffer(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor that no part expects is harmless: numbers of places, and a pooler that
    nothing reads.
    """
    return _UNUSED.fullmatch(name.removeprefix(spec.tensor_prefix)) is not None


def _layer(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    width, inner = spec.hidden_size, spec.intermediate_size
    for name in ("query", "key", "value"):
        yield from _linear(f"attention.self.{name}", width, width).items()
    yield from _linear("attention.output.dense", width, width).items()
    yield from _norm("attention.output.LayerNorm", width).items()
    yield from _linear("intermediate.dense", inner, width).items()
    yield from _linear("output.dense", width, inner).items()
    if layer + 1 < spec.num_layers:
        yield from _norm("output.LayerNorm", width).items()


def _linear(name: str, rows: int, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, width), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
