"""The disk tier lets go of what is least important, keeps beginnings of models, and remembers whose
chunks are over a restart.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_tiers import KIB, Tier, content_of
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.dataplane.disk_books import NOBODY, DiskBooks
from pilotlight.dataplane.disk_tier import BLOCK_BYTES, DiskEvent, Outranked
from pilotlight.policy.ids import Digest

A, B, C = (Digest(letter * 64) for letter in "abc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def stored(tier: Tier, model: Digest, seeds: Sequence[int]) -> list[Digest]:
    return [tier.store(content_of(seed), model) for seed in seeds]


def here(tier: Tier, digests: Sequence[Digest]) -> list[bool]:
    return [digest in tier.tier for digest in digests]


def test_the_least_important_model_goes_first_its_end_before_its_beginning(folder: Path) -> None:
    """Least recently used, it would have been that of ``A``."""
    one = Tier(folder, 4 * BLOCK_BYTES)
    of_a, of_b = stored(one, A, (0, 1)), stored(one, B, (2, 3))
    one.tier.follow((B, A, C))
    of_c = stored(one, C, (4,))
    assert here(one, [*of_a, *of_b, *of_c]) == [True, True, True, False, True]


def test_what_is_less_important_than_all_is_not_stored(folder: Path) -> None:
    one = Tier(folder, 2 * BLOCK_BYTES)
    of_a = stored(one, A, (0, 1))
    one.tier.follow((B, A))
    with pytest.raises(Outranked):
        one.store(content_of(2), B)
    with pytest.raises(Outranked):
        one.store(content_of(3), C)
    assert here(one, of_a) == [True, True]
    assert one.events[DiskEvent.EVICTED] == 0


def test_a_model_that_is_larger_than_the_disk_keeps_its_beginning(folder: Path) -> None:
    """Least recently used, each of its chunks would take the place of another one for ever."""
    one = Tier(folder, 2 * BLOCK_BYTES)
    of_a = stored(one, A, (0, 1))
    with pytest.raises(Outranked):
        one.store(content_of(2), A)
    assert here(one, of_a) == [True, True]


def test_without_an_order_the_least_recently_used_model_goes_first(folder: Path) -> None:
    one = Tier(folder, 3 * BLOCK_BYTES)
    (of_a,), (of_b,), (of_c,) = (stored(one, model, (n,)) for n, model in enumerate((A, B, C)))
    one.read(of_a, 3 * KIB)
    stored(one, Digest("d" * 64), (9,))
    assert here(one, [of_a, of_b, of_c]) == [True, False, True]


def test_a_restart_forgets_neither_owners_nor_what_is_worth_more(folder: Path) -> None:
    one = Tier(folder, 3 * BLOCK_BYTES)
    (of_a,), of_b = stored(one, A, (0,)), stored(one, B, (1, 2))
    one.tier.close()
    with (folder / "models" / A).open("a") as file:
        file.write("torn")
    two = Tier(folder, 3 * BLOCK_BYTES)
    assert (folder / "models" / A).read_text() == f"{of_a}\n"
    two.tier.follow((B, A, C))
    (of_c,) = stored(two, C, (3,))
    assert here(two, [of_a, of_c]) == [True, True]
    assert sum(here(two, of_b)) == 1
    two.tier.close()
    three = Tier(folder, BLOCK_BYTES)
    assert sum(here(three, [of_a, *of_b, of_c])) == 1
    three.tier.close()
    for path in folder.rglob("*.chunk"):
        path.unlink()
    Tier(folder)
    assert not list((folder / "models").iterdir()), "there is nothing to be known of"


def test_a_shared_chunk_belongs_to_the_model_that_used_it_last(folder: Path) -> None:
    one = Tier(folder, 2 * BLOCK_BYTES)
    (shared,), (of_b,) = stored(one, A, (0,)), stored(one, B, (1,))
    one.tier.use(shared, C)
    one.tier.follow((A, B, C))
    stored(one, C, (2,))
    assert here(one, [shared, of_b]) == [True, False]


MODELS = (NOBODY, A, B, C)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "use", "remove", "make room"]),
            st.integers(0, 9),
            st.sampled_from(MODELS),
        ),
        max_size=60,
    ),
    st.permutations(MODELS[1:]),
)
def test_victims_agree_with_the_order(
    events: list[tuple[str, int, Digest]], order: list[Digest]
) -> None:
    """After any events: bytes and chunks are counted right, and what goes is of a model than which
    none that has chunks is less important.
    """
    books, owners = DiskBooks(), dict[Digest, Digest]()
    books.follow(order)
    ranks = {model: rank for rank, model in enumerate(order)}
    for what, number, model in events:
        chunk = Digest(str(number))
        if what == "add" and chunk not in owners:
            books.used_bytes += 10
            books.add(chunk, model, 10)
            owners[chunk] = model
        elif what == "use":
            books.use(chunk, model)
            if chunk in owners:
                owners[chunk] = model
        elif what == "remove":
            assert books.remove(chunk) == (owners.pop(chunk, None) is not None)
        elif what == "make room" and owners:
            least = min(ranks.get(one, -1) for one in owners.values())
            victim = books.next()
            assert ranks.get(owners[victim], -1) == least
            if books.gives_way_to(model):
                assert least <= ranks.get(model, -1)
                assert owners[victim] != model or model == NOBODY
        assert (len(books), books.used_bytes) == (len(owners), 10 * len(owners))
        assert all(one in books for one in owners)
