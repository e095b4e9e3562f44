"""Arenas of fake devices that lend each other what lies in them."""

import os

import pytest
import torch
from lending_engines import lent_by

from pilotlight.engine.channel import mailbox
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.cuda import lending as cuda_lending
from pilotlight.engine.cuda.lending import sum_of
from pilotlight.engine.device.lending import SUM_ROW_BYTES
from pilotlight.engine.errors import EngineFailed

OUT_OF_MEMORY = 2


@pytest.fixture
def lenders(driver):
    yield from lent_by(driver)


@pytest.fixture
def arenas(lenders):
    lenders.on_device()
    lenders.on_device()
    (_, here), (_, there) = lenders.made
    for arena in (here, there):
        arena.back(Extent(0, 8 << 20))
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(256, (8 << 20,), generator=generator, dtype=torch.uint8)
    here.tensor(0, (8 << 20,), torch.uint8).copy_(bits)
    yield here, there
    for arena in (here, there):
        arena.unback(Extent(0, 8 << 20))


def test_any_granules_are_lent_bit_for_bit(arenas):
    here, there = arenas
    lent = here.lending.export(Extent(2 << 20, 6 << 20))
    assert [one.wanted for one in lent] == [Extent(2 << 20, 6 << 20)]
    borrowed = there.lending.borrow(lent, Extent(0, 4 << 20))
    assert borrowed.ready
    assert borrowed.value == here.lending.sum(Extent(2 << 20, 6 << 20)).value
    borrowed.close()
    borrowed.close()
    mine, other = (arena.tensor(0, (8 << 20,), torch.uint8) for arena in arenas)
    assert torch.equal(other[: 4 << 20], mine[2 << 20 : 6 << 20])
    close(lent)


def test_memory_in_pieces_is_lent_in_as_many(arenas):
    here, there = arenas
    here.back(Extent(8 << 20, 10 << 20))
    here.tensor(8 << 20, (2 << 20,), torch.uint8).fill_(7)
    lent = here.lending.export(Extent(6 << 20, 10 << 20))
    assert [one.wanted for one in lent] == [Extent(6 << 20, 8 << 20), Extent(0, 2 << 20)]
    borrowed = there.lending.borrow(lent, Extent(4 << 20, 8 << 20))
    assert borrowed.value == here.lending.sum(Extent(6 << 20, 10 << 20)).value
    borrowed.close()
    close(lent)
    here.unback(Extent(8 << 20, 10 << 20))


def test_a_device_that_maps_the_first_piece_alone_lets_go_of_it(arenas, lenders):
    here, there = arenas
    here.back(Extent(8 << 20, 10 << 20))
    lent = here.lending.export(Extent(6 << 20, 10 << 20))
    before = lenders.fake.mappings
    lenders.fake.fail("cuMemImportFromShareableHandle", OUT_OF_MEMORY, 2)
    with pytest.raises(EngineFailed, match="cannot be shared"):
        there.lending.borrow(lent, Extent(0, 4 << 20))
    assert lenders.fake.mappings == before
    close(lent)
    here.unback(Extent(8 << 20, 10 << 20))


def test_a_mailbox_takes_as_many_descriptors_as_go_together():
    box, nonce, many = mailbox.Mailbox(), bytes(16), mailbox.MOST_DESCRIPTORS
    read, write = os.pipe()
    mailbox.post(box.address, nonce, *[read] * many)
    with pytest.raises(OSError, match="do not go together"):
        mailbox.post(box.address, nonce, *[read] * (many + 1))
    found = box.fetch_all(nonce, many)
    assert found is not None
    mailbox.post(box.address, nonce, read)
    assert box.fetch_all(nonce, 2) is None
    box.close()
    for descriptor in (*found, read, write):
        os.close(descriptor)


@pytest.mark.parametrize("wanted", [Extent(0, 2 << 20), Extent(6 << 20, 10 << 20)])
def test_what_is_not_as_long_is_not_borrowed(arenas, wanted):
    here, there = arenas
    lent = here.lending.export(Extent(0, 4 << 20))
    changed = [type(one)(one.descriptor, one.num_bytes, wanted) for one in lent]
    with pytest.raises(EngineFailed, match="are lent for"):
        there.lending.borrow(changed, Extent(0, 4 << 20))
    close(lent)


def test_a_device_without_memory_for_sums_lends_and_borrows_nothing(arenas, lenders, monkeypatch):
    def refuse(row):
        raise torch.OutOfMemoryError("none is left")

    here, there = arenas
    lent = here.lending.export(Extent(0, 4 << 20))
    monkeypatch.setattr(cuda_lending, "sum_of", refuse)
    before = lenders.fake.mappings
    with pytest.raises(EngineFailed, match="no memory to lend"):
        here.lending.sum(Extent(0, 4 << 20))
    with pytest.raises(EngineFailed, match="no memory to lend"):
        there.lending.borrow(lent, Extent(0, 4 << 20))
    assert lenders.fake.mappings == before
    close(lent)


def test_what_else_goes_wrong_on_a_device_is_not_hidden(arenas, monkeypatch):
    def fail(row):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(cuda_lending, "sum_of", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        arenas[0].lending.sum(Extent(0, 4 << 20))


def test_what_has_no_memory_is_not_exported(arenas):
    with pytest.raises(EngineFailed, match="nothing to export"):
        arenas[0].lending.export(Extent(6 << 20, 10 << 20))


def close(lent):
    for one in lent:
        os.close(one.descriptor)


def test_a_sum_tells_a_changed_bit_and_rows_that_changed_places():
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(256, (64 * SUM_ROW_BYTES,), generator=generator, dtype=torch.uint8)
    total = int(sum_of(row))
    for at in range(0, len(row), 997):
        changed = row.clone()
        changed[at] ^= 1 << at % 8
        assert int(sum_of(changed)) != total
    assert int(sum_of(row.roll(SUM_ROW_BYTES))) != total
    assert int(sum_of(row.clone())) == total
