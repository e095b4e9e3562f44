"""Attention metadata of a batch, without a device: fields against what each row sees, written
out.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.core.blocks import BLOCK_TOKENS, blocks_for
from pilotlight.engine.cuda.attention_metadata import (
    ALIGN_WORDS,
    MAX_ROW_SPLITS,
    NOWHERE,
    QUERIES_AT_ONCE,
    fields_of,
    max_splits,
    send,
    split_keys,
    whole_prompt,
    zeros_on,
)
from pilotlight.engine.cuda.static_words import StaticDecode

CPU = torch.device("cpu")


def batch_of(spans: list[tuple[int, int]]) -> Batch:
    """Segments [start, stop) with blocks of their own, in no order."""
    numbers = iter(np.random.default_rng(3).permutation(10_000).tolist())
    return Batch(
        tuple(
            Segment(
                start,
                stop - start,
                tuple(next(numbers) for _ in range(blocks_for(stop))),
                wants_logits=stop % 5 > 0,
            )
            for start, stop in spans
        )
    )


spans = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 300)).map(
        lambda span: (span[0], span[0] + span[1])
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(spans)
def test_rows_stand_where_their_segments_say(given_spans: list[tuple[int, int]]) -> None:
    batch = batch_of(given_spans)
    fields = fields_of(batch, 20, None)
    positions = [
        position for segment in batch.segments for position in range(segment.start, segment.stop)
    ]
    tables = [segment.blocks for segment in batch.segments for _ in range(segment.count)]
    assert fields["positions"].tolist() == positions
    assert fields["slots"].tolist() == [
        table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        for table, position in zip(tables, positions, strict=True)
    ]
    for table, first in zip(tables, fields["first_blocks"].tolist(), strict=True):
        assert tuple(fields["blocks"][first : first + len(table)].tolist()) == table
    ends = np.cumsum([segment.count for segment in batch.segments]) - 1
    wanting = [
        int(end) for end, segment in zip(ends, batch.segments, strict=True) if segment.wants_logits
    ]
    assert fields["logit_rows"].tolist() == wanting


@settings(max_examples=60, deadline=None)
@given(spans)
def test_every_row_of_a_chunk_is_in_one_tile(given_spans: list[tuple[int, int]]) -> None:
    batch = batch_of(given_spans)
    fields = fields_of(batch, 20, None)
    many = [segment for segment in batch.segments if segment.count > 1]
    if not many:
        assert "tile_rows" not in fields
        return
    tiles = sorted(zip(fields["tile_segments"].tolist(), fields["tile_rows"].tolist(), strict=True))
    assert tiles == [
        (i, row)
        for i, segment in enumerate(many)
        for row in range(0, segment.count, QUERIES_AT_ONCE)
    ]
    assert fields["chunk_starts"].tolist() == [segment.start for segment in many]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5000)), min_size=1, max_size=40),
    st.integers(1, 100),
)
def test_splits_cover_each_row_once(rows: list[tuple[int, int]], spare: int) -> None:
    starts = np.array([start for start, _ in rows], np.int32)
    stops = np.array([start + length for start, length in rows], np.int32)
    counts, firsts, owners, split_starts, split_stops = split_keys(starts, stops, spare)
    assert len(owners) <= max_splits(len(rows), spare)
    assert counts.sum() == len(owners)
    assert counts.max() <= MAX_ROW_SPLITS
    for row, (start, length) in enumerate(rows):
        mine = slice(firsts[row], firsts[row] + counts[row])
        assert set(owners[mine].tolist()) == {row}
        assert [start, *split_stops[mine].tolist()] == [
            *split_starts[mine].tolist(),
            start + length,
        ]


def test_a_long_row_among_short_ones_is_cut_and_comes_first() -> None:
    stops = np.array([100] * 40 + [6000] + [700] * 40, np.int32)
    counts, _, owners, split_starts, split_stops = split_keys(np.zeros_like(stops), stops, 10)
    assert counts.tolist() == [1] * 40 + [12] + [2] * 40
    assert owners[:12].tolist() == [40] * 12
    assert (split_stops - split_starts).max() == 512
    # As long as others: rows are whole, however long they are, where they keep the device busy.
    alike = np.full(64, 3000, np.int32)
    assert split_keys(np.zeros_like(alike), alike, 10).counts.max() == 1


def test_a_window_cuts_what_splits_see() -> None:
    fields = fields_of(batch_of([(99, 100), (3, 4)]), 20, 10)
    assert fields["sliding_starts"].tolist() == [90, 0]
    assert fields["full_starts"].tolist() == [0, 64, 0]
    assert fields["full_firsts"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("spans", "whole"),
    [
        ([(7, 8), (0, 50)], slice(1, 51)),
        ([(0, 50), (7, 8)], None),
        ([(1, 60)], None),
        ([(0, 49)], None),
    ],
)
def test_a_whole_prompt_is_the_last_segment(
    spans: list[tuple[int, int]], whole: slice | None
) -> None:
    batch = batch_of(spans)
    assert whole_prompt(batch, 50) == whole
    assert ("tile_rows" in fields_of(batch, 20, None, 50)) == (whole is None)


def test_fields_begin_where_kernels_expect_it() -> None:
    step = send(fields_of(batch_of([(99, 100), (3, 9), (5, 6)]), 20, None), CPU)
    assert step.splits is not None
    for field in (
        step.rows.positions,
        step.rows.slots,
        step.rows.blocks,
        step.splits.rows,
        step.splits.stops,
    ):
        assert field.storage_offset() % ALIGN_WORDS == 0


def test_a_static_step_pads_with_unused_rows() -> None:
    static = StaticDecode(zeros_on(CPU), 8, 5, 40, None, pinned=False)
    batch = batch_of([(20, 21), (0, 1), (40, 41)])
    for _ in range(2):
        assert static.fill(batch, np.array([5, 6, 7], np.int32))
        step, token_ids = static.view(4)
        fields = fields_of(batch, 5, None)
        assert token_ids.tolist() == [5, 6, 7, 0]
        assert step.rows.slots.tolist() == [*fields["slots"].tolist(), NOWHERE]
        assert step.splits is not None
        used = fields["full_rows"].tolist()
        assert step.splits.rows.tolist() == used + [NOWHERE] * (9 - len(used))
        batch = batch_of([(20, 21), (7, 8), (100, 101)])
    assert not static.fill(batch_of([(1000, 1001)]), None)
