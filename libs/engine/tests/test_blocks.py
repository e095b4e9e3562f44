"""Safety of the block books: never leaked, never shared."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.blocks import BlockPool, blocks_for
from pilotlight.engine.core.request import RequestKey
from pilotlight.engine.errors import EngineFailed
from pilotlight.policy.types import RequestId

A, B, C, D = (RequestKey(RequestId(name), 1) for name in "abcd")


@given(
    num_blocks=st.integers(0, 40),
    moves=st.lists(st.tuples(st.sampled_from([A, B, C, D]), st.integers(1, 20)), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_no_block_is_ever_leaked_or_shared(num_blocks, moves):
    pool = BlockPool(num_blocks)
    owned: dict[RequestKey, tuple[int, ...]] = {}
    for owner, wanted in moves:
        if owner in owned:
            pool.release(owner)
            del owned[owner]
        elif (taken := pool.take(owner, wanted)) is not None:
            assert len(taken) == wanted
            owned[owner] = taken
        else:
            assert wanted > pool.free_blocks, "whatever is free can be had, side by side or not"
        held = [block for blocks in owned.values() for block in blocks]
        assert len(set(held)) == len(held), "a block has one owner"
        assert pool.free_blocks == num_blocks - len(held)
        pool.check()
    for owner in owned:
        pool.release(owner)
    assert pool.free_blocks == num_blocks
    if num_blocks:
        assert pool.take(A, num_blocks) == tuple(range(num_blocks)), "free runs grow together again"


def test_blocks_lie_side_by_side_where_a_run_is_long_enough():
    pool = BlockPool(10)
    assert (pool.take(A, 2), pool.take(B, 3), pool.take(C, 2)) == ((0, 1), (2, 3, 4), (5, 6))
    pool.release(A)
    assert pool.take(D, 3) == (7, 8, 9), "the head of the first run that is long enough, not [0, 2) and a bit"
    pool.release(C)
    assert pool.take(A, 4) == (0, 1, 5, 6), "pieces only when there is no such run"
    assert pool.take(C, 1) is None


def test_an_owner_takes_once_and_releases_as_often_as_it_likes():
    pool = BlockPool(4)
    pool.take(A, 1)
    with pytest.raises(EngineFailed):
        pool.take(A, 1)
    pool.release(A)
    pool.release(A)
    assert pool.free_blocks == 4


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (512, 32)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens) == blocks
