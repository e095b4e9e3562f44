"""Text to token ids and back."""

from pilotlight.common.errors import BadRequest
from pilotlight.text.bounds import bound_of
from pilotlight.text.bundle import TextBundle, parse_tokenizer
from pilotlight.text.decoding import TokenDecoder


class TextTokenizer(TokenDecoder):
    """A model's whole tokenizer: foreign code, which may panic or work for long.

    Services use it in a process that may be lost.
    """

    def __init__(self, bundle: TextBundle) -> None:
        """Build it.

        Raises:
            BadCheckpoint: the bundle's ``tokenizer.json`` is broken.
        """
        tokenizer = parse_tokenizer(bundle.tokenizer_json)
        # Some exports carry the settings of their training run; a prompt is neither cut nor filled
        # up behind one's back.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        eos_token = bundle.special_tokens.get("eos_token")
        own_end = None if eos_token is None else tokenizer.token_to_id(eos_token)
        ends = (*bundle.generation.eos_token_ids, *(() if own_end is None else (own_end,)))
        added = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        super().__init__(tokenizer, tuple(dict.fromkeys(ends)), added)
        bos_token = bundle.special_tokens.get("bos_token")
        self._add_bos_token = bundle.add_bos_token
        self._bos_token_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
        self.raw = tokenizer
        """The library's own."""
        self.bound = bound_of(tokenizer)
        """How many tokens a text has at least."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: anything; names of special tokens within it become those tokens.
            add_special_tokens: begin as the model was trained to, usually with ``bos_token``. False
                for what a chat template has written: templates write their own.

        Raises:
            BadRequest: the text holds lone surrogates, which are no characters.
        """
        wanted = add_special_tokens and self._add_bos_token is not False
        try:
            token_ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=wanted)[0].ids
        except TypeError as error:
            raise BadRequest("the text is not valid Unicode") from error
        adds_by_itself = self._tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        if wanted and self._add_bos_token and self._bos_token_id is not None and not adds_by_itself:
            token_ids.insert(0, self._bos_token_id)
        return token_ids
