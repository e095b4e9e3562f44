"""Many texts, or pairs of them, encoded at once for a model that makes vectors or scores."""

from array import array

from pilotlight.common.errors import BadRequest, ContextTooLong
from pilotlight.gateway.texts.frames import EncodedSeveral, Several
from pilotlight.text.pairs import Frame, encode_text
from pilotlight.text.tokenizer import TextTokenizer


def encode_several(tokenizer: TextTokenizer, job: Several) -> EncodedSeveral:
    """Token ids of each text.

    Raises:
        BadRequest: a text is not valid Unicode, or what is to stay of it is nothing.
        ContextTooLong: one is longer than the model takes, and it may not be cut.
    """
    frame = Frame(job.before, job.after) if job.before or job.after else None
    token_ids: list[bytes] = []
    second_starts: list[int | None] = []
    for place, first in enumerate(job.firsts):
        second = job.seconds[place] if job.seconds else None
        if frame is None and job.truncate_to is None:
            _check_bound(tokenizer, job, place, first)
        ids, second_start = encode_text(tokenizer, first, second, job.truncate_to, frame)
        if len(ids) > job.context_tokens:
            raise too_long(job.param, place, len(ids), job.context_tokens)
        if not ids:
            raise BadRequest(f"{job.param}[{place}] is empty", param=job.param)
        token_ids.append(array("I", ids).tobytes())
        second_starts.append(second_start)
    return EncodedSeveral(
        token_ids, second_starts, [_one_id(tokenizer, text) for text in job.answers]
    )


def too_long(
    param: str, place: int, tokens: int, most: int, *, more: bool = False
) -> ContextTooLong:
    """The error that says by how much a text is too long.

    Args:
        param: the request's field.
        place: of the text in it.
        tokens: what it has; with ``more`` it has at least this number.
        most: what the model takes.
        more: the text was not counted to its end.
    """
    counted = f"{'at least ' if more else ''}{tokens}"
    return ContextTooLong(
        f"{param}[{place}] has {counted} tokens, and this model's maximum context length is {most} tokens: "
        "shorten it, or set truncate_prompt_tokens",
        param=param,
    )


def _check_bound(tokenizer: TextTokenizer, job: Several, place: int, text: str) -> None:
    """Refuses what is too long by far before it is encoded."""
    most = job.context_tokens
    if len(text) > most and (least := tokenizer.bound.least_tokens(text)) > most:
        raise too_long(job.param, place, least, most, more=True)


def _one_id(tokenizer: TextTokenizer, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise BadRequest(f"the model's answer {text!r} is not one token", param="model")
    return ids[0]
