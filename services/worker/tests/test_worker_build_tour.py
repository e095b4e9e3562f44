"""A build's tour goes through every kind of batch that kernels are compiled for, and asks of no
model more than it takes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.cuda.graphs import SIZES, size_for
from pilotlight.engine.cuda.prompts import LENGTHS
from pilotlight.engine.cuda.whole_prompts import WHOLE_TOKENS
from pilotlight.worker.build_tour import tour

MANY_ROWS = 1024
"""As ``kernels.prefill_attention`` has it, which cannot be imported without triton."""
WHOLE = tour(32_768, 65_536)
FP8_TOKENS = (16, 32, 64, 128, 192, 256)
"""What rows are made up to (``kernels.fp8``), as far as decode steps go."""


def padded(tokens: int) -> int:
    return next(size for size in FP8_TOKENS if tokens <= size)


def test_prompts_alone_are_of_each_padded_length_and_of_each_kind_beyond() -> None:
    alone = [step.prompts[0] for step in WHOLE if len(step.prompts) == 1 and not step.later]
    lengths = {next((one for one in LENGTHS if tokens <= one), 0) for tokens in alone}
    assert lengths >= {*LENGTHS}
    assert any(max(LENGTHS[-1], MANY_ROWS) < tokens < WHOLE_TOKENS for tokens in alone)
    assert any(tokens >= WHOLE_TOKENS for tokens in alone)
    assert 1 in alone


def test_prompts_that_are_one_batch_are_few_rows_and_many() -> None:
    sums = [sum(step.prompts) for step in WHOLE if 1 < len(step.prompts) < 4]
    assert min(sums) < 16
    assert any(16 <= rows < MANY_ROWS for rows in sums)
    assert max(sums) >= MANY_ROWS
    most = max(max(step.prompts) for step in WHOLE if len(step.prompts) == 2)
    assert most < WHOLE_TOKENS, "no piece of them is a whole prompt that cuDNN takes"


def test_decode_steps_fill_each_multiple_of_tokens() -> None:
    sizes = {size_for(len(step.prompts)) for step in WHOLE if step.output_tokens > 1}
    assert None not in sizes
    found = {padded(size) for size in sizes if size is not None and size > 1}
    assert found == {*FP8_TOKENS}
    assert {padded(size) for size in SIZES if size > 1} == {*FP8_TOKENS}


def test_prompts_come_beside_requests_that_decode() -> None:
    beside = [step.later[0] for step in WHOLE if step.later]
    assert min(beside) + 1 < 16 <= max(beside)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_no_model_is_asked_for_more_than_it_takes(most_tokens: int, room_tokens: int) -> None:
    for step in tour(most_tokens, room_tokens):
        assert max((*step.prompts, *step.later)) + step.output_tokens <= most_tokens
        assert step.tokens <= room_tokens


def test_a_model_without_room_has_no_tour() -> None:
    assert tour(2, 2) == ()


@pytest.mark.parametrize("most_tokens", [64, 512, 4096])
def test_shorter_contexts_lose_the_long_prompts_alone(most_tokens: int) -> None:
    steps = tour(most_tokens, 65_536)
    assert {len(step.prompts) for step in steps} >= {2, 24, 48, 100, 160, 250}
