"""One text, or two that belong together, to token ids: for models that read and do not continue.

What a ``tokenizer.json`` says is put around texts is put there (its post-processor), whatever
``tokenizer_config.json`` says of generation.
"""

from dataclasses import dataclass

from tokenizers import Encoding

from pilotlight.common.errors import BadRequest
from pilotlight.text.tokenizer import TextTokenizer

Encoded = tuple[list[int], int | None]
"""Token ids, and where the second text's token types begin; None: there are no such types."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a text in the place of special tokens."""

    before: str
    after: str


def encode_text(
    tokenizer: TextTokenizer,
    first: str,
    second: str | None,
    truncate_to: int | None,
    frame: Frame | None = None,
) -> Encoded:
    """Encodes a text, or two.

    Args:
        tokenizer: the model's.
        first: the text, or the first of two.
        second: the other; None: there is one text.
        truncate_to: most tokens of all, special ones included: the text loses what is beyond at its
            end, of two the second one. None: nothing is cut.
        frame: what is put around ``first`` alone, as text.

    Raises:
        BadRequest: a text is not valid Unicode, or is to be cut to nothing.
    """
    try:
        if frame is not None:
            return _framed(tokenizer, first, frame, truncate_to), None
        raw = tokenizer.raw
        if truncate_to is None:
            return _told(raw.encode(first, second))
        parts = [
            raw.encode(text, add_special_tokens=False)
            for text in (first, second)
            if text is not None
        ]
        special = raw.num_special_tokens_to_add(is_pair=second is not None)
    except TypeError as error:
        raise BadRequest("the text is not valid Unicode") from error
    kept = truncate_to - special - sum(map(len, parts[:-1]))
    _cut(parts[-1], kept)
    return _told(raw.post_process(parts[0], parts[1] if len(parts) > 1 else None))


def _framed(
    tokenizer: TextTokenizer, text: str, frame: Frame, truncate_to: int | None
) -> list[int]:
    before, inner, after = (
        tokenizer.raw.encode(each, add_special_tokens=False)
        for each in (frame.before, text, frame.after)
    )
    if truncate_to is not None:
        _cut(inner, truncate_to - len(before) - len(after))
    return [*before.ids, *inner.ids, *after.ids]


def _cut(encoding: Encoding, kept: int) -> None:
    if kept < 1:
        raise BadRequest(
            "nothing would be left of a text: truncate_prompt_tokens is too small",
            param="truncate_prompt_tokens",
        )
    encoding.truncate(kept)


def _told(encoding: Encoding) -> Encoded:
    types = encoding.type_ids
    return encoding.ids, types.index(1) if 1 in types else None
