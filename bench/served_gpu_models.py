"""Models for ``bench/served_gpu.py``: random weights of a shape with a tokenizer beside them, and
prompts of a given number of tokens.
"""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_gpu_job import MAX_CONTEXT_TOKENS, VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
WEIGHTS_S = 180.0
WHOLE = "whole"
"""A file of this name says that nothing of the folder is missing."""
END = "<|endoftext|>"
SPACE = "Ġ"
"""How byte-level tokens write it."""
FIRST_LETTERS, SECOND_LETTERS, VOWELS = "bdfgklmnps", "cjhqrtvwxz", "aeiou"
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""A template: the words of a conversation."""
TRIES = 20


def tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer as Qwen's is, of as many tokens: syllables, words of two, and as
    many pairs of such words as fit.

    A word's first syllable begins with other letters than its second, so that there is one way to
    merge it: each token's text is that token alone when it is read again.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = [letter + vowel for letter in FIRST_LETTERS for vowel in VOWELS]
    second = [letter + vowel for letter in SECOND_LETTERS for vowel in VOWELS]
    words = [(one, other) for one in first for other in second]
    merges = [(syllable[0], syllable[1]) for syllable in first + second] + words
    merges += [(SPACE, one + other) for one, other in words]
    room = vocab_size - len(alphabet) - len(merges) - 1
    texts = ["".join(word) for word in words]
    merges += [
        (SPACE + texts[place // len(texts)], texts[place % len(texts)]) for place in range(room)
    ]
    vocabulary = {
        token: number
        for number, token in enumerate([*alphabet, *(one + other for one, other in merges)])
    }
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def write_tokenizer(folder: Path) -> None:
    """As Hugging Face's libraries read it."""
    tokenizer().save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": CHAT,
        "model_max_length": MAX_CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def prepare(shape: str, folder: Path) -> None:
    """Write the model of a shape into the folder, unless it is there whole; then read all of it
    once: it is in the page cache.

    Raises:
        subprocess.SubprocessError: the weights could not be written.
    """
    if not (folder / WHOLE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "engine_gpu_weights.py"), shape, str(folder)]
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=WEIGHTS_S)
        write_tokenizer(folder)
        (folder / WHOLE).touch()
    piece = bytearray(16 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


@dataclass(frozen=True)
class Prompts:
    """Random texts of words that are one token each."""

    tokenizer: Tokenizer
    words: Sequence[str]

    @classmethod
    def of(cls, folder: Path) -> "Prompts":
        """By the tokenizer of a model."""
        read = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain = (
            token
            for token in read.get_vocab()
            if token.startswith(SPACE) and token[1:].isascii() and token[1:].isalpha()
        )
        return cls(read, sorted(f" {token[1:]}" for token in plain if len(token) > 2))

    def draw(self, seed: int, lengths: Sequence[int]) -> list[str]:
        """Prompts of these numbers of tokens; those of different seeds have nothing in common, so
        no prefix cache helps.

        Raises:
            ValueError: this tokenizer merges its words.
        """
        dice = random.Random(seed)
        found = ["".join(dice.choices(self.words, k=length)) for length in lengths]
        for _ in range(TRIES):
            tokens = [len(each.ids) for each in self.tokenizer.encode_batch(found)]
            wrong = [
                place
                for place, (has, wanted) in enumerate(zip(tokens, lengths, strict=True))
                if has != wanted
            ]
            if not wrong:
                return found
            for place in wrong:
                found[place] = "".join(dice.choices(self.words, k=lengths[place]))
        raise ValueError(
            f"{len(wrong)} of {len(lengths)} prompts do not have the tokens that they are to have"
        )
