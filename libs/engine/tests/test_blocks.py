"""The block books: which blocks are taken, shared, kept, forgotten, and in which order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.blocks import BlockHash, BlockPool, blocks_for
from pilotlight.engine.core.free_runs import SPARE_ENTRIES, FreeRuns
from pilotlight.engine.core.prefix import extend_hashes, root_hash
from pilotlight.engine.errors import EngineFailed

A, B, C, D = (BlockHash(name.encode()) for name in "abcd")


def sealed(pool: BlockPool, *names: BlockHash) -> tuple[int, ...]:
    """A table whose blocks have these names."""
    taken = pool.take(len(names))
    for block, name in zip(taken, names, strict=True):
        pool.seal(block, name)
    return taken


@given(
    num_blocks=st.integers(0, 40),
    moves=st.lists(st.tuples(st.integers(0, 50), st.integers(-1, 40)), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_free_runs_are_a_set(num_blocks, moves):
    runs, taken = FreeRuns(num_blocks), set()
    for wanted, after in moves:
        if wanted > 40 and taken:
            runs.add(taken.pop())
        else:
            got = runs.take(wanted, after if after >= 0 else None)
            assert len(set(got)) == len(got) == min(wanted, num_blocks - len(taken))
            assert not taken.intersection(got)
            assert (
                after not in range(num_blocks - 1)
                or after + 1 in taken
                or not got
                or got[0] == after + 1
            )
            taken.update(got)
        assert len(runs) == num_blocks - len(taken)
        assert list(runs) == [block for block in range(num_blocks) if block not in taken]
    for block in taken:
        runs.add(block)
    assert runs.take(num_blocks, None) == list(range(num_blocks)), "runs grow together again"


class SlowRuns:
    """The rules of ``FreeRuns.take``, told by looking at every block."""

    def __init__(self, num_blocks: int) -> None:
        self.free = set(range(num_blocks))

    def runs(self) -> list[range]:
        starts = sorted(block for block in self.free if block - 1 not in self.free)
        stops = sorted(block + 1 for block in self.free if block + 1 not in self.free)
        return [range(*run) for run in zip(starts, stops, strict=True)]

    def take(self, num_blocks: int, after: int | None) -> list[int]:
        taken: list[int] = []
        while self.free and len(taken) < num_blocks:
            wanted = num_blocks - len(taken)
            behind = taken[-1] + 1 if taken else after + 1 if after is not None else None
            if behind not in self.free:
                run = max(self.runs(), key=lambda run: (len(run), -run.start))
                at_head = run.start == 0 or 2 * wanted > len(run)
                behind = run.start if at_head else run[len(run) // 2]
            while behind in self.free and len(taken) < num_blocks:
                self.free.remove(behind)
                taken.append(behind)
                behind += 1
        return taken


@given(
    num_blocks=st.integers(0, 60),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 12), st.integers(-1, 60)),
            st.tuples(st.just("add"), st.integers(0, 60), st.just(0)),
            st.tuples(st.just("resize"), st.integers(0, 60), st.just(0)),
        ),
        max_size=120,
    ),
)
@settings(max_examples=300, deadline=None)
def test_free_runs_give_the_blocks_that_the_rules_give(num_blocks, moves):
    runs, rules, taken = FreeRuns(num_blocks), SlowRuns(num_blocks), list[int]()
    for what, count, after in moves:
        if what == "take":
            got = runs.take(count, after if after >= 0 else None)
            assert got == rules.take(count, after if after >= 0 else None)
            taken += got
        elif what == "add" and taken:
            block = taken.pop(count % len(taken))
            runs.add(block)
            rules.free.add(block)
        elif what == "resize":
            runs.truncate(count)
            rules.free -= set(range(count, 61))
            taken = [block for block in taken if block < count]
        assert list(runs) == sorted(rules.free)
        assert len(runs) == len(rules.free)


def test_looking_for_the_longest_run_keeps_no_more_entries_than_twice_the_runs():
    runs = FreeRuns(10_000)
    for round_ in range(20):
        taken = runs.take(10_000, None)
        for block in taken[round_ % 3 :: 3]:
            runs.add(block)
        for block in set(taken) - set(taken[round_ % 3 :: 3]):
            runs.add(block)
    assert list(runs) == list(range(10_000))
    assert len(runs._longest_first) <= 2 + SPARE_ENTRIES


def test_requests_that_grow_side_by_side_do_not_meet_soon():
    runs = FreeRuns(40)
    first, second = runs.take(3, None), runs.take(2, None)
    assert (first, second) == ([0, 1, 2], [21, 22])
    for _ in range(10):
        first += runs.take(1, first[-1])
        second += runs.take(1, second[-1])
    assert first == list(range(13))
    assert second == list(range(21, 33))
    assert runs.take(12, None) == [*range(13, 21), *range(33, 37)], (
        "pieces only when no run is long enough"
    )


def test_a_released_name_is_found_until_its_block_is_needed():
    pool = BlockPool(6)
    first, second = sealed(pool, A, B), sealed(pool, C)
    pool.release(first)
    pool.release(second)
    assert (pool.free_blocks, pool.cached_blocks) == (6, 3)
    assert len(pool.take(3)) == 3
    assert pool.find([A, B]) == first, "clean blocks go first"
    pool.take(1)
    assert (pool.find([A, B]), pool.find([C])) == (first[:1], second), (
        "then the end of what was released first"
    )
    pool.take(1)
    assert (pool.find([A]), pool.find([C])) == ((), second)
    pool.take(1)
    assert (pool.find([C]), pool.take(1)) == ((), None)


def test_what_is_shared_is_new_again():
    pool = BlockPool(2)
    first, second = sealed(pool, A), sealed(pool, B)
    pool.release(first)
    pool.release(second)
    pool.share(pool.find([A]))
    pool.release(first)
    pool.take(1)
    assert (pool.find([A]), pool.find([B])) == (first, ())


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2)
    table = sealed(pool, A)
    pool.share(table)
    pool.check([table, table])
    pool.release(table)
    assert pool.free_blocks == 1
    assert pool.free_beside(table) == 1
    assert pool.take(2) is None
    pool.release(table)
    assert pool.free_blocks == 2
    assert pool.free_beside(table) == 1
    pool.check([])


def test_a_chain_is_found_up_to_its_first_gap():
    pool = BlockPool(4)
    table = sealed(pool, A, B, C)
    assert pool.find([A, B, D, C]) == table[:2]
    assert pool.find([D, A]) == ()


def test_of_two_blocks_with_one_content_one_has_the_name():
    pool = BlockPool(3)
    first, second = sealed(pool, A), sealed(pool, A)
    assert pool.find([A]) == first
    pool.release(second)
    assert (pool.free_blocks, pool.cached_blocks) == (2, 0), "the other is clean"
    pool.check([first])


def test_only_private_blocks_are_sealed():
    pool = BlockPool(3)
    table = sealed(pool, A)
    with pytest.raises(EngineFailed, match="not private"):
        pool.seal(table[0], B)
    with pytest.raises(EngineFailed, match="not private"):
        pool.seal(2 if table[0] != 2 else 1, B)


@pytest.mark.parametrize(
    "tables", [[], [(0,)], [(0, 1), (0, 1)], [(0, 1, 2)]], ids=["leak", "lost", "shared", "free"]
)
def test_books_that_do_not_fit_the_tables_are_found(tables):
    pool = BlockPool(4)
    assert pool.take(2) == (0, 1)
    pool.check([(0, 1)])
    with pytest.raises(EngineFailed):
        pool.check(tables)


def test_a_private_block_with_two_owners_is_found():
    pool = BlockPool(4)
    table = pool.take(1)
    pool._owners[table[0]] = 2
    with pytest.raises(EngineFailed, match="not full"):
        pool.check([table, table])


def chain(namespace: str, token_ids: list[int]) -> list[bytes]:
    hashes: list[BlockHash] = []
    extend_hashes(root_hash(namespace), hashes, token_ids)
    return hashes


@given(
    first=st.lists(st.integers(0, 1), min_size=16, max_size=48),
    second=st.lists(st.integers(0, 1), min_size=16, max_size=48),
    namespaces=st.tuples(st.sampled_from("xy"), st.sampled_from("xy")),
)
@settings(max_examples=300, deadline=None)
def test_names_are_equal_where_all_tokens_so_far_are(first, second, namespaces):
    names = zip(chain(namespaces[0], first), chain(namespaces[1], second), strict=False)
    for index, (one, other) in enumerate(names):
        stop = 16 * (index + 1)
        assert (one == other) == (namespaces[0] == namespaces[1] and first[:stop] == second[:stop])


def test_a_chain_goes_on_where_it_ended():
    tokens = list(range(100))
    hashes: list[BlockHash] = []
    for stop in (5, 16, 40, 41, 100):
        extend_hashes(root_hash("x"), hashes, tokens[:stop])
        assert len(hashes) == stop // 16
    assert hashes == chain("x", tokens)


def test_names_are_the_same_in_every_process():
    """Another worker must find what this one has sent it."""
    assert (
        chain("model", list(range(16)))[0].hex()
        == "812949042b0b2bcffadc1b133da9b6941cea916e75eaf45f6fa05db8cc25d9c5"
    )


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (512, 32)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens) == blocks
