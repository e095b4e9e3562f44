"""Trials read and write nothing of the cache; their digest sees every bit."""

import hashlib

import numpy as np
import pytest
import torch
from random_models import spec_of

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.cuda import trials
from pilotlight.engine.cuda.attention_metadata import NOWHERE, QUERIES_AT_ONCE, zeros_on
from pilotlight.engine.cuda.graphs import SIZES
from pilotlight.engine.cuda.prompts import LENGTHS, StaticPrompt
from pilotlight.engine.cuda.static_words import StaticDecode
from pilotlight.engine.cuda.trials import digest_of
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype

VOCAB = 997


def words_of(window_tokens: int | None) -> StaticDecode:
    place = zeros_on(torch.device("cpu"))
    return StaticDecode(place, SIZES[-1], 64, 4096, window_tokens, pinned=False)


@pytest.mark.parametrize("window_tokens", [None, 40])
@pytest.mark.parametrize("rows", SIZES)
def test_every_row_of_a_trial_sees_itself_alone(rows: int, window_tokens: int | None) -> None:
    static = words_of(window_tokens)
    static.static.words.fill_(12345)
    with static.trial(rows, VOCAB):
        step, token_ids = static.view(rows)
        assert (step.rows.slots == NOWHERE).all(), "nothing is stored"
        assert (step.rows.positions == 0).all()
        assert ((token_ids >= 0) & (token_ids < VOCAB)).all()
        assert rows < 3 or len(set(token_ids.tolist())) > 2
        for splits in (step.splits, step.sliding_splits):
            assert splits is not None
            owners = splits.rows.tolist()
            for row in range(rows):
                first, count = int(splits.firsts[row]), int(splits.counts[row])
                assert owners[first : first + count] == [row] * count
                stops = splits.stops[first : first + count].tolist()
                assert stops == [1, 0][:count], "no key before its own"
                assert splits.starts[first : first + count].tolist() == [0] * count
            assert [one for one in owners if one != NOWHERE] == sorted(
                row for row in range(rows) for _ in range(1 + row % 2)
            )
    assert (static.static.words == 12345).all(), "the step under way has its words back"


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompts_trial_has_the_first_block_alone(length: int) -> None:
    static = StaticPrompt(zeros_on(torch.device("cpu")), pinned=False)
    static.static.words.fill_(12345)
    for rows in (length, length - 3):
        with static.trial(rows, VOCAB):
            step, token_ids = static.view(length)
            assert step.chunks is not None
            assert step.logit_rows is not None
            slots = step.rows.slots.tolist()
            stored = [row for row, slot in enumerate(slots) if slot != NOWHERE]
            assert [slots[row] for row in stored] == list(range(min(rows, BLOCK_TOKENS)))
            assert stored[-1] == rows - 1 == int(step.logit_rows)
            gaps = np.diff([-1, *stored])
            assert gaps.max() - gaps.min() <= 1, "evenly"
            assert not step.rows.blocks[: -(-rows // BLOCK_TOKENS)].any()
            assert step.rows.positions[:rows].tolist() == list(range(rows))
            chunks = step.chunks
            told = [int(one) for one in (chunks.rows, chunks.starts, chunks.counts)]
            assert told == [0, 0, rows]
            assert not chunks.first_blocks.any()
            assert not chunks.tile_segments.any()
            assert chunks.tile_rows.tolist() == list(range(0, length, QUERIES_AT_ONCE))
            assert ((token_ids >= 0) & (token_ids < VOCAB)).all()
            assert len(set(token_ids[:rows].tolist())) > rows // 2
    assert (static.static.words == 12345).all(), "the step under way has its words back"


def test_the_first_block_of_each_layer_is_put_back() -> None:
    spec = spec_of("llama", Dtype.FLOAT32)
    memory = StageMemory(CpuArena(), decoder_of(spec), spec.whole, spec.dtype)
    kv = KvCache(memory, 3)
    halves = [half for layer in range(spec.num_layers) for half in kv.stored(layer)]
    for number, half in enumerate(halves):
        half.copy_(torch.arange(half.numel()).view_as(half) + number)
    before = [half.clone() for half in halves]
    with kv.first_block_kept():
        for half in halves:
            half[:BLOCK_TOKENS] = -1.0
    assert all(map(torch.equal, halves, before))
    memory.close()


@pytest.mark.parametrize("rows", [1, 2, 3, 35])
def test_a_digest_is_the_same_wherever_it_is_computed(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(rows, VOCAB).bfloat16()
    bits = logits.view(torch.int16).numpy().astype(np.int64)
    odd = np.arange(1, 2 * VOCAB, 2, dtype=np.int64) * np.int64(trials._MULTIPLIER)
    sums = (bits * odd).sum(axis=1)
    expected = hashlib.blake2b(sums.tobytes(), digest_size=32).hexdigest()
    for host_rows in (0, 64):
        monkeypatch.setattr(trials, "HOST_ROWS", host_rows)
        assert digest_of(logits) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_digest_sees_every_bit(dtype: torch.dtype) -> None:
    logits = torch.randn(35, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    recorded = digest_of(logits)
    assert digest_of(logits.clone()) == recorded
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    for row, column, bit in ((0, 0, 0), (34, 996, 8 * dtype.itemsize - 1), (17, 500, 7)):
        other = logits.clone()
        changed = torch.tensor(1 << bit, dtype=torch.int64).to(bits)
        other.view(bits)[row, column] ^= changed
        assert digest_of(other) != recorded, (row, column, bit)
    swapped = logits.clone()
    swapped[3, [5, 6]] = logits[3, [6, 5]]
    assert digest_of(swapped) != recorded
