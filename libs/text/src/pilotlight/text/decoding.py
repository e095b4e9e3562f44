"""Token ids to text, with the part of a tokenizer that this takes: the vocabulary and the decoder.

A checkpoint's tokenizer is foreign code: its normalizer and its regular expressions can panic, or
work for minutes. Decoding needs neither. ``decoder_json`` makes a tokenizer without them, and
refuses decoders whose work has no bound; the gateway's event loop loads that.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import tokenizers

from pilotlight.common.errors import BadCheckpoint, TextFailed

MAX_DECODED_CHARS = 16 * 1024
"""What one token may be decoded to at most. A streamed answer decodes a window of some thirty
tokens with each new one."""
MAX_DECODER_STEPS = 16
MAX_PIECES = 65_536
"""Tokens of one model whose bytes are kept."""

_PLAIN_STEPS = frozenset(
    {"ByteLevel", "Metaspace", "WordPiece", "BPEDecoder", "CTC", "ByteFallback", "Fuse", "Strip"}
)
_PLAIN_GROWTH = 2
"""What one of these makes of a character at most."""
_UNUSED = ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")

_SHOWN_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES_OF = {chr(byte): bytes([byte]) for byte in _SHOWN_BYTES} | {
    chr(0x100 + number): bytes([byte])
    for number, byte in enumerate(sorted({*range(0x100)} - {*_SHOWN_BYTES}))
}
"""How byte-level tokenizers write bytes: those that are printable in Latin-1 as themselves, the
others from U+0100 on, in order."""


class TokenDecoder:
    """What streaming an answer needs of a tokenizer."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int],
        added_tokens: Mapping[str, int],
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        """Tokens that end an output: the generation configuration's, and the tokenizer's own."""
        specials = tokenizer.get_added_tokens_decoder().items()
        self._specials = frozenset(token_id for token_id, token in specials if token.special)
        self.added_tokens = dict(added_tokens)
        """Tokens beside the vocabulary proper, special or not, by their text."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        """Tokens that have a text. A model may know more ids: its vocabulary is often rounded up.
        """
        self._visible: set[int] = set()
        """Those that were asked about: all of them would take a moment to find."""
        self._pieces: dict[int, bytes] | None = (
            {} if type(tokenizer.decoder) is tokenizers.decoders.ByteLevel else None
        )
        """What the library's decoder makes of tokens that were met; None where it looks at more
        than each of them."""
        self._byte_tokens = self._find_byte_tokens()
        self._added_texts = {token_id: text for text, token_id in self.added_tokens.items()}
        # In the letters of byte-level tokenizers é is spelled in two; every other decoder leaves
        # them as they are.
        self.byte_level = tokenizer.decoder is not None and tokenizer.decoder.decode(["Ã©"]) == "é"
        """Its text is the UTF-8 of its tokens' bytes, one after the other."""

    @classmethod
    def of(
        cls, decoder: str, eos_token_ids: Sequence[int], added_tokens: Mapping[str, int]
    ) -> "TokenDecoder":
        """From what ``decoder_json`` made; takes a moment for large vocabularies, so callers with
        an event loop use a thread.

        Raises:
            BadCheckpoint: it cannot be used.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(decoder), eos_token_ids, added_tokens)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise BadCheckpoint(f"tokenizer.json: its decoder cannot be used: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a text are left out.

        Raises:
            TextFailed: the library panics on them.
        """
        try:
            if self._pieces is not None and not skip_special_tokens:
                return self.spelled(token_ids).decode(errors="replace")
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _failed(error) from error

    @property
    def spells(self) -> bool:
        """Whether its text is what ``spelled`` gives, and nothing that comes later changes that."""
        return self._pieces is not None

    def spelled(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of a byte-level decoder's tokens, which may end within a character; in less
        time than the library, which looks at each token's letters anew.

        Raises:
            ValueError: this decoder does not spell.
        """
        pieces = self._pieces
        if pieces is None:
            raise ValueError("only byte-level decoders spell")
        try:
            return b"".join(map(pieces.__getitem__, token_ids))
        except KeyError:
            return b"".join([self._piece(token_id, pieces) for token_id in token_ids])

    def _piece(self, token_id: int, pieces: dict[int, bytes]) -> bytes:
        known = pieces.get(token_id)
        if known is not None:
            return known
        token = self._tokenizer.id_to_token(token_id) or ""
        # A token with a letter that stands for no byte is its own text, all of it.
        spelled = [_BYTES_OF.get(char) for char in token]
        piece = b"".join([each for each in spelled if each is not None])
        if None in spelled:
            piece = token.encode()
        if len(pieces) < MAX_PIECES:
            pieces[token_id] = piece
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which may be only parts of characters; those of an output's tokens
        are together its text in UTF-8, but for a blank that some tokenizers leave out at the
        beginning. Empty for an id without a text.

        Raises:
            TextFailed: the library panics on it.
        """
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added_texts:
            return self._added_texts[token_id].encode()
        if token_id in self._byte_tokens:
            return bytes([int(piece[3:-1], 16)])
        if self.byte_level:
            return b"".join(_BYTES_OF.get(char) or char.encode() for char in piece)
        # Among others: alone, a word would lose the blank before it.
        decoder = self._tokenizer.decoder
        try:
            return (decoder.decode(["a", piece])[1:] if decoder is not None else piece).encode()
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _failed(error) from error

    def is_visible(self, token_id: int) -> bool:
        """Whether ``decode`` looks at this id at all when it skips special tokens."""
        if token_id in self._visible:
            return True
        visible = (
            token_id not in self._specials and self._tokenizer.id_to_token(token_id) is not None
        )
        if visible:
            self._visible.add(token_id)
        return visible

    def are_visible(self, token_ids: Sequence[int]) -> bool:
        """Whether ``decode`` looks at all of them; False also where one is asked about for the
        first time.
        """
        return self._visible.issuperset(token_ids)

    def shown(self, token_ids: Sequence[int], kept: Collection[int]) -> list[int]:
        """Those of them that are visible, or among ``kept``."""
        seen, specials = self._visible, self._specials
        return [
            token_id
            for token_id in token_ids
            if token_id in seen
            or token_id in kept
            or (token_id not in specials and self.is_visible(token_id))
        ]

    def is_byte(self, token_id: int) -> bool:
        """Whether this is a byte-fallback token: a run of them is decoded as one."""
        return token_id in self._byte_tokens

    def _find_byte_tokens(self) -> frozenset[int]:
        found = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        byte_tokens = [token_id for token_id in found if token_id is not None]
        # A vocabulary may have such names without a decoder that gives them a meaning: 0xC3 0xA9 is
        # é in UTF-8.
        if len(byte_tokens) < 256 or self.decode([byte_tokens[0xC3], byte_tokens[0xA9]]) != "é":
            return frozenset()
        return frozenset(byte_tokens)


def _failed(panic: BaseException) -> TextFailed:
    return TextFailed(f"the model's tokenizer fails on its own tokens: {panic}")


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of a library in Rust: a BaseException whose class no module names."""
    return type(error).__name__ == "PanicException"


def decoder_json(tokenizer: tokenizers.Tokenizer) -> str:
    """A ``tokenizer.json`` that decodes as this one does, and can do nothing else.

    Raises:
        BadCheckpoint: its decoder's work has no bound, or a token is far too long.
    """
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    longest_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    decoder = described["decoder"]
    growth = 1 if decoder is None else _growth(decoder)
    if longest_chars * growth > MAX_DECODED_CHARS:
        raise BadCheckpoint(
            f"tokenizer.json: its longest token has {longest_chars} characters, which its decoder may make {longest_chars * growth}; "
            f"at most {MAX_DECODED_CHARS} are taken"
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    # Decoding looks tokens up by their ids. Any model can do that, and this one has nothing beside;
    # but it cannot hold a piece twice.
    if len(set(vocabulary.values())) == tokenizer.get_vocab_size(with_added_tokens=False):
        described["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    for token in described["added_tokens"]:
        # What a normalizer makes of it is what it is decoded to.
        token["content"] = tokenizer.id_to_token(token["id"])
    return json.dumps({**described, **dict.fromkeys(_UNUSED)}, ensure_ascii=False)


def _growth(decoder: Mapping[str, Any]) -> int:
    """How many characters a decoder makes of one, at most."""
    steps = _steps(decoder)
    if len(steps) > MAX_DECODER_STEPS:
        raise BadCheckpoint(
            f"tokenizer.json: its decoder has {len(steps)} steps; at most {MAX_DECODER_STEPS} are taken"
        )
    growth = 1
    for step in steps:
        if step["type"] in _PLAIN_STEPS:
            growth *= _PLAIN_GROWTH if step["type"] in ("WordPiece", "BPEDecoder", "CTC") else 1
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            pattern, content = step["pattern"]["String"], step["content"]
            growth *= max(1, len(content)) if pattern else 1 + len(content)
        else:
            raise BadCheckpoint(
                f"tokenizer.json: a decoder with {json.dumps(step)[:100]} is not supported"
            )
    return growth


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    inner = cast("list[Mapping[str, Any]]", decoder["decoders"])
    return [step for each in inner for step in _steps(each)]
