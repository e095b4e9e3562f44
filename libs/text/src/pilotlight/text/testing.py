"""Small tokenizers for tests, of the two kinds that checkpoints come with.

Made on the spot; nothing is downloaded.
"""

import json
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "The pilot light stays on, so that the burner lights at once.",
    "hello hello world, said the fox; it's  two  spaces\n\nand a new line\tand a tab",
    "naïve café, Grüße aus Köln, ça va?",
    "你好世界。今天天气很好。こんにちは世界",
    "emoji 😀 👍🏽 👩‍👩‍👧 and é combining",
)
"""What the tokenizers are trained on."""
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level_json(vocab_size: int = 400) -> str:
    """A ``tokenizer.json`` like those of Llama 3 and Qwen: byte-level BPE.

    Rare characters are spread over several tokens.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return _finished(made)


@cache
def ascii_json() -> str:
    """A ``tokenizer.json`` of 102 tokens, one for each printable ASCII character and a few more:
    for models with tiny vocabularies.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [symbol for symbol in alphabet if symbol.isascii()]
    pieces = [*SPECIALS, *plain, *(symbol for symbol in alphabet if symbol in "ĠĊ"), "tr"]
    made = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [("t", "r")])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _finished(made)


@cache
def byte_fallback_json(vocab_size: int = 300) -> str:
    """A ``tokenizer.json`` like Llama 2's: words begin with ``▁``, what the vocabulary lacks is
    spelled in byte tokens.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    learned: Any = json.loads(learner.to_str())["model"]
    pieces = [*_first_pieces(), *sorted(learned["vocab"], key=learned["vocab"].__getitem__)]
    merges = [(left, right) for left, right in learned["merges"]]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    made.normalizer = learner.normalizer
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return _finished(made)


def unigram_json(vocab_size: int = 400) -> str:
    """A ``tokenizer.json`` of a sentencepiece Unigram model: Metaspace, with byte fallback."""
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    learner.train_from_iterator(CORPUS[:3], trainer)
    learned: Any = json.loads(learner.to_str())["model"]["vocab"]
    pieces = [(piece, float(score)) for piece, score in learned if piece != "<unk>"]
    made = Tokenizer(
        models.Unigram(
            [(piece, 0.0) for piece in _first_pieces()] + pieces, unk_id=0, byte_fallback=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _finished(made)


def _first_pieces() -> list[str]:
    return ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]


def _finished(made: Any) -> str:
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    made.add_tokens([AddedToken("<tool>", special=False)])
    first = made.token_to_id(SPECIALS[0])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", first)]
    )
    return made.to_str()
