"""How many tokens a text has at least, found without encoding it.

Only for tokenizers of which it can be said for certain: those that drop nothing. A text of n bytes
(or characters) has at least n / longest tokens then. Others, which may drop or fuse what they do
not know, have no such bound, and their texts are encoded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tokenizers
from tokenizers import pre_tokenizers

NFC_SHRINKS = 4
"""Normalizing to NFC makes a text at most this many times shorter in UTF-8: U+1FBE U+0308 U+0301
has 7 bytes and becomes one of 2."""
_SPLITTERS = frozenset({"Split", "Digits", "Punctuation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """What is known of a tokenizer."""

    longest: int = 0
    """Bytes or characters of a text that one token stands for at most; 0: nothing is known."""
    in_bytes: bool = False
    blanks: bool = False
    """Blanks are counted: no added token swallows those beside it."""

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has in any case; 0 where nothing is known."""
        if self.longest == 0:
            return 0
        counted = text if self.blanks else "".join(text.split())
        return (
            len(counted.encode(errors="surrogatepass")) if self.in_bytes else len(counted)
        ) // self.longest


UNKNOWN = TokenBound()


def bound_of(tokenizer: tokenizers.Tokenizer) -> TokenBound:
    """What is known of this tokenizer."""
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    model: Mapping[str, Any] = described["model"]
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added: Sequence[Mapping[str, Any]] = described["added_tokens"]
    blanks = not any(token["lstrip"] or token["rstrip"] for token in added)
    normalizers = _parts(described["normalizer"], "normalizers")
    splitters = _parts(described["pre_tokenizer"], "pretokenizers")
    if _keeps_bytes(model, vocabulary, splitters) and all(
        step["type"] == "NFC" for step in normalizers
    ):
        longest = max([*map(len, vocabulary), *(len(token["content"].encode()) for token in added)])
        return TokenBound(
            longest=longest * (NFC_SHRINKS if normalizers else 1), in_bytes=True, blanks=blanks
        )
    if _keeps_chars(model, vocabulary, splitters) and all(map(_is_no_shorter, normalizers)):
        return TokenBound(
            longest=max([*map(len, vocabulary), *(len(token["content"]) for token in added)]),
            blanks=blanks,
        )
    return UNKNOWN


def _keeps_bytes(
    model: Mapping[str, Any], vocabulary: Mapping[str, int], splitters: Sequence[Mapping[str, Any]]
) -> bool:
    """Byte-level BPE that knows every byte."""
    return (
        model["type"] == "BPE"
        and not model["continuing_subword_prefix"]
        and not model["end_of_word_suffix"]
        and bool(splitters)
        and splitters[-1]["type"] == "ByteLevel"
        and all(map(_drops_nothing, splitters[:-1]))
        and all(symbol in vocabulary for symbol in pre_tokenizers.ByteLevel.alphabet())
    )


def _keeps_chars(
    model: Mapping[str, Any], vocabulary: Mapping[str, int], splitters: Sequence[Mapping[str, Any]]
) -> bool:
    """Spells what it does not know in bytes, and knows every byte."""
    return (
        model["type"] in ("BPE", "Unigram")
        and bool(model["byte_fallback"])
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and all(
            splitter["type"] == "Metaspace" or _drops_nothing(splitter) for splitter in splitters
        )
        and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    )


def _drops_nothing(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in _SPLITTERS and splitter.get("behavior") != "Removed"


def _is_no_shorter(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Prepend":
        return True
    return step["type"] == "Replace" and len(step["content"]) >= len(
        step["pattern"].get("String", step["content"] + " ")
    )


def _parts(described: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [
        part
        for each in cast("list[Mapping[str, Any]]", described[inner])
        for part in _parts(each, inner)
    ]
