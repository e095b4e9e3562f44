"""Small tokenizers for tests, of the two kinds that checkpoints come with. Made on the spot; nothing is downloaded."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "The pilot light stays on, so that the burner lights at once.",
    "hello hello world, said the fox; it's  two  spaces\n\nand a new line\tand a tab",
    "naïve café, Grüße aus Köln, ça va?",
    "你好世界，今天天气很好。こんにちは世界",
    "emoji 😀 👍🏽 👩‍👩‍👧 and é combining",
)
"""What the tokenizers are trained on."""
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level_json(vocab_size: int = 400) -> str:
    """A ``tokenizer.json`` like those of Llama 3 and Qwen: byte-level BPE. Rare characters are spread over several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(made, trainer)


def byte_fallback_json(vocab_size: int = 400) -> str:
    """A ``tokenizer.json`` like Llama 2's: words begin with ``▁``, what the vocabulary lacks is spelled in byte tokens."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=_with_bytes(), limit_alphabet=60, show_progress=False)
    return _trained(made, trainer)


def unigram_json(vocab_size: int = 400) -> str:
    """A ``tokenizer.json`` of a sentencepiece Unigram model: Metaspace, with byte fallback."""
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    learner.train_from_iterator(CORPUS[:3], trainer)
    learned: Any = learner.get_vocab()
    pieces = [piece for piece in sorted(learned, key=learned.__getitem__) if piece != "<unk>"]
    vocabulary = [(token, 0.0) for token in _with_bytes()] + [(piece, -float(len(pieces))) for piece in pieces]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _finished(made)


def _with_bytes() -> list[str]:
    return ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]


def _trained(made: Tokenizer, trainer: trainers.BpeTrainer) -> str:
    made.train_from_iterator(CORPUS, trainer)
    return _finished(made)


def _finished(made: Tokenizer) -> str:
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    made.add_tokens([AddedToken("<tool>", special=False)])
    first = made.token_to_id(SPECIALS[0])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", first)])
    return made.to_str()
