"""Digests of chunks: the first node that reads a part writes them down, and they bind every
node.
"""

import asyncio
import os
from functools import partial

import msgspec
import pytest

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.common.errors import CorruptChunk, PilotlightError, SourceUnavailable
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import until
from pilotlight.loader.manifests import (
    StoredManifests,
    all_digests_key,
    digests_key,
    recorded_digests,
    unknown_parts,
)
from pilotlight.loader.testing import ALL, Cluster, recorded
from pilotlight.policy.ids import Digest

pytestmark = pytest.mark.anyio


async def test_the_first_fetch_writes_digests_that_bind_every_node(cluster: Cluster) -> None:
    model = cluster.register()
    first = await cluster.start()
    assert await cluster.lease(model, (1, 3)) == [1, 3]
    parts = await recorded(first, model, (1, 3))
    manifest = msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest)
    assert {part: len(digests) for part, digests in parts.items()} == {
        part: len(manifest.parts[part].chunks) for part in (1, 3)
    }
    assert not await first.context.store.exists(digests_key(model.digest, 0)), "no node has read it"
    assert not await first.context.store.exists(all_digests_key(model.digest))
    assert await cluster.lease(model) == list(ALL)
    await until(lambda: first.context.store.exists(all_digests_key(model.digest)))
    every = await first.context.store.get(all_digests_key(model.digest))
    assert msgspec.json.decode(every) == list((await recorded(first, model, ALL)).values())
    await first.stop()

    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    # The whole list binds, and so does a part's own.
    last = digests_key(model.digest, ALL[-1])
    for key, data in (
        (all_digests_key(model.digest), every),
        (last, await first.context.store.get(last)),
    ):
        cluster.objects[key] = data
        again = await cluster.start()
        with pytest.raises(CorruptChunk):
            await cluster.lease(model)
        await again.stop()
        del cluster.objects[key]


async def test_two_nodes_that_read_other_bytes_at_once_are_bound_by_one_of_them(
    cluster: Cluster,
) -> None:
    model = cluster.register()
    running = await cluster.start()
    for part in ALL:
        nodes = [
            StoredManifests(running.context.store, running.context.background) for _ in range(3)
        ]
        read = [Digest(f"{number:02x}" * 32) for number in range(3)]
        disputed: dict[int, PilotlightError] = {}
        for node in nodes:
            await node.latest(model)
        for number, node in enumerate(nodes):
            node.learned(model, part, (read[number],), partial(disputed.__setitem__, number))
        await until(lambda disputed=disputed: len(disputed) == 2)
        [first] = {0, 1, 2} - disputed.keys()
        assert {type(error) for error in disputed.values()} == {CorruptChunk}
        assert await recorded(running, model, (part,)) == {part: [read[first]]}
        # From now on all of them are checked against the first one's.
        for node in nodes:
            assert (await node.latest(model)).parts[part].chunks[0].digest == read[first]


async def test_a_part_is_bound_by_what_another_node_has_read(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    manifests = StoredManifests(running.context.store, running.context.background)
    await manifests.get(model)
    assert await cluster.lease(model, (0,)) == [0]
    await manifests.publish(model, 2, (Digest("ab" * 32),))
    with pytest.raises(CorruptChunk, match="recorded is abab"):
        await cluster.lease(model, (1, 2))
    assert await cluster.lease(model, (0, 1)) == [0, 1]


async def test_two_nodes_that_read_the_same_agree(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    nodes = [StoredManifests(running.context.store, running.context.background) for _ in range(2)]
    assert await cluster.lease(model) == list(ALL)
    parts = await recorded(running, model, ALL)
    for node in nodes:
        await node.get(model)
    await asyncio.gather(
        *(node.publish(model, part, tuple(parts[part])) for node in nodes for part in ALL)
    )
    assert await recorded(running, model, ALL) == parts
    fresh = StoredManifests(running.context.store, running.context.background)
    assert unknown_parts(await fresh.latest(model)) == ()


async def test_what_others_record_later_is_noticed_by_the_next_fetch(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    one, two = (
        StoredManifests(running.context.store, running.context.background) for _ in range(2)
    )
    assert unknown_parts(await one.latest(model)) == ALL
    await two.get(model)
    manifest = await one.get(model)
    digests = {
        part: tuple(Digest(f"{part:02x}" * 32) for _ in manifest.parts[part].chunks) for part in ALL
    }
    await two.publish(model, 1, digests[1])
    assert unknown_parts(await one.get(model)) == ALL
    assert unknown_parts(await one.latest(model)) == (0, 2, 3)
    for part in (0, 2, 3):
        await two.publish(model, part, digests[part])
    assert unknown_parts(await one.latest(model)) == ()
    assert recorded_digests(await one.get(model)) == {
        (p, c): one for p in ALL for c, one in enumerate(digests[p])
    }


async def test_a_manifest_that_is_gone(cluster: Cluster) -> None:
    model = cluster.register()
    cluster.objects.clear()
    await cluster.start()
    with pytest.raises(SourceUnavailable, match="manifest"):
        await cluster.lease(model)
