"""Text to token ids and back."""

from collections.abc import Sequence

from pilotlight.common.errors import BadRequest
from pilotlight.text.bundle import TextBundle, parse_tokenizer


class TextTokenizer:
    """A model's tokenizer. Long texts are encoded without the GIL: callers with an event loop use a thread."""

    def __init__(self, bundle: TextBundle) -> None:
        """Build it.

        Raises:
            BadCheckpoint: the bundle's ``tokenizer.json`` is broken.
        """
        self._tokenizer = parse_tokenizer(bundle.tokenizer_json)
        # Some exports carry the settings of their training run; a prompt is neither cut nor filled up behind one's back.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._specials = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.added_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        """Tokens beside the vocabulary proper, special or not, by their text."""
        self._byte_tokens = self._find_byte_tokens()
        self._add_bos_token = bundle.add_bos_token
        self._bos_token_id = self._id_of(bundle.special_tokens.get("bos_token"))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        """Tokens that have a text. A model may know more ids: its vocabulary is often rounded up."""
        eos_token_id = self._id_of(bundle.special_tokens.get("eos_token"))
        ends = (*bundle.generation.eos_token_ids, *(() if eos_token_id is None else (eos_token_id,)))
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        """Tokens that end an output: the generation configuration's, and the tokenizer's own."""
        self._longest_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has in any case, found without encoding it.

        Blanks are not counted: there are tokenizers that drop them.
        """
        return sum(map(len, text.split())) // max(1, self._longest_token_chars)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: anything; names of special tokens within it become those tokens.
            add_special_tokens: begin as the model was trained to, usually with ``bos_token``. False for what a chat template has
                written: templates write their own.

        Raises:
            BadRequest: the text holds lone surrogates, which are no characters.
        """
        wanted = add_special_tokens and self._add_bos_token is not False
        try:
            # Not ``encode``: it holds the GIL to its end, for seconds when the text is long.
            token_ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=wanted)[0].ids
        except TypeError as error:
            raise BadRequest("the text is not valid Unicode") from error
        adds_by_itself = self._tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        if wanted and self._add_bos_token and self._bos_token_id is not None and not adds_by_itself:
            token_ids.insert(0, self._bos_token_id)
        return token_ids

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of what a chat template wrote: nothing is added, so no special token stands there twice."""
        return self.encode(prompt, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a text are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def is_visible(self, token_id: int) -> bool:
        """Whether ``decode`` looks at this id at all when it skips special tokens."""
        return token_id not in self._specials and self._tokenizer.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether this is a byte-fallback token: a run of them is decoded as one."""
        return token_id in self._byte_tokens

    def _find_byte_tokens(self) -> frozenset[int]:
        found = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        byte_tokens = [token_id for token_id in found if token_id is not None]
        # A vocabulary may have such names without a decoder that gives them a meaning: 0xC3 0xA9 is é in UTF-8.
        if len(byte_tokens) < 256 or self._tokenizer.decode([byte_tokens[0xC3], byte_tokens[0xA9]]) != "é":
            return frozenset()
        return frozenset(byte_tokens)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)
