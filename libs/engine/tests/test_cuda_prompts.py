"""What kernels are told of one short prompt alone: what it would be told unpadded, and padding that
is not used.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.cuda.attention_metadata import NOWHERE, QUERIES_AT_ONCE, fields_of, zeros_on
from pilotlight.engine.cuda.prompts import LENGTHS, MAX_BLOCKS, StaticPrompt, prompt_length

CPU = torch.device("cpu")


def prompt(start: int, count: int, *, wants_logits: bool = True) -> Batch:
    blocks = np.random.default_rng(count).permutation(10_000)[: blocks_for(start + count)].tolist()
    return Batch((Segment(start, count, tuple(blocks), wants_logits),))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(2, LENGTHS[-1])), min_size=1, max_size=4)
)
def test_padding_is_unused(spans: list[tuple[int, int]]) -> None:
    """One after the other in the same words: nothing of a longer prompt is left for a shorter
    one.
    """
    static = StaticPrompt(zeros_on(CPU), pinned=False)
    for start, count in spans:
        batch = prompt(start, count)
        length = prompt_length(batch)
        assert length is not None
        assert count <= length
        assert static.fill(batch, np.arange(count, dtype=np.int32) + 7)
        step, token_ids = static.view(length)
        plain = fields_of(batch, 0, None)
        assert not step.plain
        assert (step.splits, step.sliding_splits, step.whole) == (None, None, None)
        assert token_ids.tolist() == [*range(7, 7 + count), *[0] * (length - count)]
        assert step.rows.slots.tolist() == [*plain["slots"].tolist(), *[NOWHERE] * (length - count)]
        assert step.rows.positions[:count].tolist() == list(range(start, start + count))
        assert step.rows.blocks[: len(plain["blocks"])].tolist() == plain["blocks"].tolist()
        assert step.logit_rows is not None
        assert step.logit_rows.tolist() == [count - 1]
        chunks = step.chunks
        assert chunks is not None
        told = [
            field.tolist()
            for field in (chunks.rows, chunks.starts, chunks.counts, chunks.first_blocks)
        ]
        assert told == [[0], [start], [count], [0]]
        tiles = len(plain["tile_rows"])
        assert chunks.tile_rows[:tiles].tolist() == plain["tile_rows"].tolist()
        assert len(chunks.tile_rows) == len(chunks.tile_segments) == -(-length // QUERIES_AT_ONCE)
        assert bool((chunks.tile_rows[tiles:] >= count).all()), (
            "a tile that begins behind the rows ends at once"
        )
        assert not chunks.tile_segments.any()


def test_what_is_no_short_prompt_alone_has_no_length() -> None:
    segment = prompt(0, 30).segments[0]
    assert prompt_length(Batch((segment,))) == 32
    assert prompt_length(prompt(100, 128)) == 128
    for other in (
        Batch((segment, segment)),
        prompt(0, 30, wants_logits=False),
        prompt(5, 1),
        prompt(0, LENGTHS[-1] + 1),
    ):
        assert prompt_length(other) is None


def test_a_context_with_more_blocks_than_there_are_words_is_left_to_others() -> None:
    static = StaticPrompt(zeros_on(CPU), pinned=False)
    before = static.static.words.clone()
    start = MAX_BLOCKS * BLOCK_TOKENS
    batch = Batch((Segment(start, 20, tuple(range(blocks_for(start + 20))), True),))
    assert prompt_length(batch) == 32
    assert not static.fill(batch, None)
    assert torch.equal(static.static.words, before)
