"""Tiny random models that make vectors or scores, as transformers and sentence-transformers save
them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

VOCABULARY = 199
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "attn_implementation": "sdpa",
}
_QWEN = {**_SIZES, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256}
_ROBERTA = {**_SIZES, "type_vocab_size": 1, "pad_token_id": 1}
POOLED_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**_SIZES)),
    "bert_relu": lambda: BertModel(BertConfig(**_SIZES, hidden_act="relu")),
    "roberta": lambda: RobertaModel(RobertaConfig(**_ROBERTA)),
    "qwen3_backbone": lambda: Qwen3Model(Qwen3Config(**_QWEN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_QWEN, tie_word_embeddings=True)),
    "bert_cross": lambda: BertForSequenceClassification(BertConfig(**_SIZES, num_labels=1)),
    "xlm_roberta_cross": lambda: XLMRobertaForSequenceClassification(
        XLMRobertaConfig(**_ROBERTA, num_labels=1)
    ),
    "qwen3_reranker": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_QWEN, tie_word_embeddings=True, classifier_from_token=["no", "yes"])
    ),
}


def save_pooled(
    kind: str, folder: Path, *, mode: str | None = None, normalize: bool = True, seed: int = 0
) -> PreTrainedModel:
    """Writes a model's weights and what says how it makes vectors.

    Args:
        kind: one of ``POOLED_MODELS``.
        folder: where to.
        mode: ``cls``, ``mean`` or ``lasttoken``; None: the model has no such files.
        normalize: whether a module ``Normalize`` follows.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    model = POOLED_MODELS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than an initialised model's, and no bias is zero: each counts.
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.normal_(mean=centre, std=0.2)
    model.save_pretrained(folder)
    if mode is not None:
        modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        listed = [
            {
                "idx": number,
                "name": str(number),
                "path": "",
                "type": f"sentence_transformers.models.{name}",
            }
            for number, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        said = {"word_embedding_dimension": _SIZES["hidden_size"]} | {
            key: key
            in (f"pooling_mode_{mode}", f"pooling_mode_{mode}_token", f"pooling_mode_{mode}_tokens")
            for key in (
                "pooling_mode_cls_token",
                "pooling_mode_mean_tokens",
                "pooling_mode_max_tokens",
                "pooling_mode_mean_sqrt_len_tokens",
                "pooling_mode_lasttoken",
            )
        }
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    return model


_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "light",
    "burns",
    "and",
    "rain",
    "falls",
    "on",
    "no",
    "yes",
)
_SPECIAL = {
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
    "qwen3": ["<|endoftext|>", "[UNK]", "<|im_start|>", "<|im_end|>"],
}


def save_tokenizer(kind: str, folder: Path) -> None:
    """Writes a tokenizer of a few words, which puts around texts what models of the kind have
    there: ``bert`` or ``qwen3``.
    """
    special = _SPECIAL[kind]
    listed = [*special, *_WORDS, *"abcdefghijklmnopqrstuvwxyz", *"0123456789<>:.,?!-"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(listed))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    if kind == "bert":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
