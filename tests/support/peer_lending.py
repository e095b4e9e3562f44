"""Roles of two processes of ``peer_child.py``: one copies from the other one's arena."""

import os
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from pilotlight.engine.channel.channel import wait_for_any
from pilotlight.engine.channel.mailbox import Mailbox, post
from pilotlight.engine.core.extents import Extent
from pilotlight.engine.device.lending import Lent
from pilotlight.engine.pipeline.frames import LentChunk, PartLent, PartWanted, pack, unpack

if TYPE_CHECKING:
    from peer_child import Child

    from pilotlight.engine.cuda.arena import CudaArena

ROUNDS, WAIT_S = 5, 120
FORM = b"any"


def lends(child: "Child") -> dict[str, Any]:
    """Lends the first bytes of its arena, as many as it is asked for; at the end it dies, or takes
    the memory away, where that is wanted.
    """
    channel, arena = child.connects("lends"), child.arena
    sizes: list[int] = child.options["sizes"]
    arena.back(Extent(0, max(sizes)))
    fill(arena, max(sizes))
    for number in range(len(sizes) * ROUNDS):
        wanted = unpack(channel.receive(WAIT_S))
        assert isinstance(wanted, PartWanted)
        extent = Extent(0, wanted.part)
        total = arena.lending.sum(extent).value
        lent, nonce = arena.lending.export(extent), bytes([number] * 16)
        post(wanted.mailbox, nonce, *(one.descriptor for one in lent))
        for one in lent:
            os.close(one.descriptor)
        chunks = tuple(LentChunk(one.num_bytes, one.wanted.start, one.wanted.stop) for one in lent)
        answer = PartLent(part=wanted.part, nonce=nonce, chunks=chunks, total=total)
        channel.send(pack(answer), WAIT_S)
    if child.options.get("dies"):
        print("{}", flush=True)
        os._exit(0)
    channel.close()
    return {}


def borrows(child: "Child") -> dict[str, Any]:
    """Copies each size a few times; the last one when the other process has ended."""
    channel, arena = child.door.accept("lends", WAIT_S), child.arena
    sizes: list[int] = child.options["sizes"]
    arena.back(Extent(0, max(sizes)))
    there = arena.tensor(0, (max(sizes),), torch.uint8)
    mailbox, speeds, wrong = Mailbox(), list[dict[str, Any]](), list[int]()
    for size in sizes:
        took_s: list[float] = []
        for number in range(ROUNDS):
            there.zero_()
            channel.send(pack(PartWanted(part=size, form=FORM, mailbox=mailbox.address)), WAIT_S)
            answer = unpack(channel.receive(WAIT_S))
            assert isinstance(answer, PartLent)
            descriptors = mailbox.fetch_all(answer.nonce, len(answer.chunks))
            assert descriptors is not None
            found = [
                Lent(descriptor, chunk.num_bytes, Extent(chunk.start, chunk.stop))
                for descriptor, chunk in zip(descriptors, answer.chunks, strict=True)
            ]
            if size == sizes[-1] and number == ROUNDS - 1:
                while not channel.lost:
                    wait_for_any([channel], 0.1)
            if child.device.type == "cuda":
                torch.cuda.synchronize()
            began_s = monotonic()
            borrowed = arena.lending.borrow(found, Extent(0, size))
            total = borrowed.value
            took_s.append(monotonic() - began_s)
            borrowed.close()
            for descriptor in descriptors:
                os.close(descriptor)
            if total != answer.total or not is_filled(arena, size):
                wrong.append(size)
        speeds.append({"bytes": size, "gb_per_s": [round(size / one / 1e9, 3) for one in took_s]})
    mailbox.close()
    channel.close()
    return {"wrong": wrong, "speeds": speeds}


def fill(arena: "CudaArena", num_bytes: int) -> None:
    """The same bits in every process."""
    generator = torch.Generator().manual_seed(17)
    words = torch.randint(1 << 62, (num_bytes // 8,), generator=generator)
    arena.tensor(0, (num_bytes // 8,), torch.int64).copy_(words)


def is_filled(arena: "CudaArena", num_bytes: int) -> bool:
    """The first bytes are those of ``fill``."""
    generator = torch.Generator().manual_seed(17)
    words = torch.randint(1 << 62, (num_bytes // 8,), generator=generator)
    return torch.equal(arena.tensor(0, (num_bytes // 8,), torch.int64).cpu(), words)
