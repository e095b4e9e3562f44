"""Fetches whose source is not what was pinned or recorded: they fail, leave nothing wrong behind,
and can be tried again.
"""

import os
from collections.abc import Callable

import pytest

from pilotlight.common.errors import CorruptChunk, PilotlightError, SourceChanged
from pilotlight.policy.ids import InstanceId

ONE = InstanceId("inst-1")
TWO = InstanceId("inst-2")

pytestmark = pytest.mark.anyio


async def test_first_fetch_learns_digests_and_the_second_is_checked_against_them(
    make_node, register
) -> None:
    node = make_node()
    registered = node.add(register())
    digest = registered.model.digest
    first = node.copies.claim(registered.model, registered.parts, ONE, leased=False)
    await node.drain(first)
    node.copies.release(first)
    await node.settled()
    known = node.manifests.manifests[digest]
    assert all(chunk.digest is not None for part in known.parts for chunk in part.chunks)
    assert node.copies.drop([digest]) == (digest,)

    # One bit of the last tensor turns, and the file's time is put back.
    weights = registered.folder / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = node.copies.claim(registered.model, registered.parts, TWO, leased=True)
    with pytest.raises(CorruptChunk, match="recorded is"):
        await node.drain(again)
    node.copies.release(again)
    await node.settled()
    last = len(registered.manifest.parts) - 1
    assert node.pool.find(digest, last) is None
    assert node.pool.find(digest, 0) is not None, "parts that were verified stay"


def touch(registered) -> None:
    weights = registered.folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))


def shorten(registered) -> None:
    os.truncate(registered.folder / "model.safetensors", 100)


def remove(registered) -> None:
    (registered.folder / "model.safetensors").unlink()


def make_a_pipe(registered) -> None:
    remove(registered)
    os.mkfifo(registered.folder / "model.safetensors")


def replace(registered) -> None:
    weights = registered.folder / "model.safetensors"
    other = weights.with_name("other")
    other.write_bytes(weights.read_bytes())
    os.utime(other, ns=(1, 1))
    other.rename(weights)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (touch, SourceChanged),
        (shorten, SourceChanged),
        (remove, SourceChanged),
        (replace, SourceChanged),
        (make_a_pipe, SourceChanged),
    ],
)
async def test_a_source_that_is_not_what_was_pinned(
    make_node, register, damage: Callable[..., None], error: type[PilotlightError]
) -> None:
    node = make_node()
    registered = node.add(register())
    damage(registered)
    claim = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    with pytest.raises(error, match=r"model\.safetensors"):
        await node.drain(claim)
    await node.settled()
    assert node.pool.free_bytes == node.pool.geometry.data_bytes


async def test_a_failed_fetch_fails_all_who_wait_and_can_be_tried_again(
    make_node, register
) -> None:
    node = make_node()
    registered = node.add(register())
    weights = registered.folder / "model.safetensors"
    hidden = weights.rename(weights.with_name("hidden"))
    claims = [
        node.copies.claim(registered.model, registered.parts, ONE, leased=True) for _ in range(3)
    ]
    for claim in claims:
        with pytest.raises(SourceChanged):
            await node.drain(claim)
        node.copies.release(claim)
    hidden.rename(weights)
    again = node.copies.claim(registered.model, registered.parts, ONE, leased=True)
    assert await node.drain(again) == list(registered.parts)
