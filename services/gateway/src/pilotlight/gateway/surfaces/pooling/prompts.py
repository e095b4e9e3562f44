"""From texts of requests to prompts of models that make vectors or scores."""

from array import array
from collections.abc import Sequence
from typing import cast

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.schema.pooling import MAX_INPUTS, EmbeddingRequest
from pilotlight.gateway.surfaces.pooling.pooled import Prompt
from pilotlight.gateway.texts.frames import Several
from pilotlight.gateway.texts.several import too_long
from pilotlight.gateway.texts.texts import Texts
from pilotlight.policy.pooling import Pooled, Pooling

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen3-Reranker is told where a request does not say it: its model card's."""
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PooledPrompts:
    """Makes them, by text helpers."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def of_inputs(
        self, entry: CatalogEntry, body: EmbeddingRequest, owner: str
    ) -> list[Prompt]:
        """What is to be made a vector of.

        Args:
            entry: the model.
            body: the request.
            owner: whose request it is.

        Raises:
            BadRequest: there is nothing, or too much, or what the model does not have.
            ContextTooLong: a text is too long.
            QueueFull, TextUnavailable: not now.
        """
        pooling, spec = pooling_of(entry), entry.model.spec
        inputs = _inputs_of(body.input)
        cut = _cut_to(body.truncate_prompt_tokens, spec.max_context_tokens)
        pooled = Pooled(mode=pooling.mode, dimensions=_dimensions(entry, pooling, body.dimensions))
        texts = [each for each in inputs if isinstance(each, str)]
        if not texts:
            ids = [each for each in inputs if not isinstance(each, str)]
            return [_of_ids(entry, place, each, cut, pooled) for place, each in enumerate(ids)]
        if len(texts) < len(inputs):
            raise BadRequest("input has texts beside token ids", param="input")
        if "" in texts:
            raise BadRequest(f"input[{texts.index('')}] is empty", param="input")
        job = Several(
            digest=entry.model.text_digest,
            context_tokens=spec.max_context_tokens,
            firsts=texts,
            truncate_to=cut,
            param="input",
        )
        encoded = await self._texts.encode_several(job, owner)
        return [Prompt(array("I", ids).tolist(), pooled) for ids in encoded.token_ids]

    async def of_pairs(
        self,
        entry: CatalogEntry,
        pairs: Sequence[tuple[str, str]],
        owner: str,
        *,
        param: str,
        truncate: int | None,
        instruction: str | None,
    ) -> list[Prompt]:
        """What is to be scored.

        Args:
            entry: the model.
            pairs: of texts.
            owner: whose request it is.
            param: the field that the second texts came in.
            truncate: as the request says.
            instruction: likewise.

        Raises:
            BadRequest: there is too much, or what the model does not have.
            ContextTooLong: a pair is too long.
            QueueFull, TextUnavailable: not now.
        """
        pooling, most = pooling_of(entry), entry.model.spec.max_context_tokens
        _count(len(pairs), param)
        told = bool(pooling.answers)
        if instruction is not None and not told:
            raise BadRequest(
                f"{entry.model.name} is told no instruction: leave it out", param="instruction"
            )
        asked = INSTRUCTION if instruction is None else instruction
        job = Several(
            digest=entry.model.text_digest,
            context_tokens=most,
            firsts=[
                f"<Instruct>: {asked}\n<Query>: {first}\n<Document>: {second}" if told else first
                for first, second in pairs
            ],
            seconds=[] if told else [second for _, second in pairs],
            before=BEFORE if told else "",
            after=AFTER if told else "",
            truncate_to=_cut_to(truncate, most),
            answers=pooling.answers,
            param=param,
        )
        encoded = await self._texts.encode_several(job, owner)
        return [
            Prompt(
                array("I", ids).tolist(),
                Pooled(mode=pooling.mode, second_starts=start, answers=tuple(encoded.answers)),
            )
            for ids, start in zip(encoded.token_ids, encoded.second_starts, strict=True)
        ]


def pooling_of(entry: CatalogEntry) -> Pooling:
    """How the model pools; its task has been looked at."""
    pooling = entry.model.spec.pooling
    assert pooling is not None, "a model of another task is refused before"
    return pooling


def _inputs_of(given: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    if isinstance(given, str):
        given = [given]
    numbers = [each for each in given if isinstance(each, int)]
    if not given or (numbers and len(numbers) < len(given)):
        raise BadRequest(
            "input is a text, token ids, or a list of such; token ids stand in lists of their own",
            param="input",
        )
    inputs = [numbers] if numbers else cast("list[str | list[int]]", given)
    _count(len(inputs), "input")
    return inputs


def _count(found: int, param: str) -> None:
    if found > MAX_INPUTS:
        raise BadRequest(f"{found} texts; at most {MAX_INPUTS} are taken", param=param)


def _cut_to(asked: int | None, most: int) -> int | None:
    if asked is None:
        return None
    if asked == 0:
        raise BadRequest(
            "truncate_prompt_tokens 0 leaves nothing of a text", param="truncate_prompt_tokens"
        )
    return most if asked == -1 else min(asked, most)


def _dimensions(entry: CatalogEntry, pooling: Pooling, asked: int | None) -> int | None:
    if asked is None:
        return None
    most = entry.model.spec.hidden_size
    if asked > most or (pooling.dimensions and asked not in pooling.dimensions):
        there = ", ".join(map(str, pooling.dimensions)) or f"1 to {most}"
        raise BadRequest(
            f"{entry.model.name} has vectors of {there} dimensions, not {asked}", param="dimensions"
        )
    return asked


def _of_ids(
    entry: CatalogEntry, place: int, ids: list[int], cut: int | None, pooled: Pooled
) -> Prompt:
    spec = entry.model.spec
    kept = ids[:cut]
    if not kept:
        raise BadRequest(f"input[{place}] is empty", param="input")
    if not 0 <= min(kept) <= max(kept) < spec.vocab_size:
        raise BadRequest(
            f"token ids of {entry.model.name} are 0 to {spec.vocab_size - 1}", param="input"
        )
    if len(kept) > spec.max_context_tokens:
        raise too_long("input", place, len(kept), spec.max_context_tokens)
    return Prompt(kept, pooled)
