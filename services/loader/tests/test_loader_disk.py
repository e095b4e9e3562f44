"""The disk tier of a node, from one loader to the next."""

import os

import msgspec
import pytest

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.common.errors import DiskTierTaken, SourceChanged
from pilotlight.common.messages.room import DISK_ORDER_SUBJECT, DiskOrder
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import until
from pilotlight.loader.disk import NodeDisk
from pilotlight.loader.manifests import all_digests_key
from pilotlight.loader.testing import ALL, Cluster, holds
from pilotlight.policy.cluster import OriginKind
from pilotlight.policy.model import Model

pytestmark = pytest.mark.anyio


async def test_what_is_on_the_disk_needs_no_source(cluster: Cluster) -> None:
    """The host pool is removed with the first loader, the source before the second one: its bytes
    are on the disk, but for a torn file.
    """
    model = cluster.register()
    tier = {"disk_tier_dir": cluster.folder / "tier", "disk_tier_bytes": 64 * 1024 * 1024}
    first = await cluster.start(**tier)
    assert await cluster.lease(model) == list(ALL)
    manifest = msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest)
    chunks = sum(len(part.chunks) for part in manifest.parts)
    stored = await cluster.heard.report(
        lambda report: (
            len(list((cluster.folder / "tier").rglob("*.chunk"))) == chunks
            and report.facts.disk_tier_used_bytes > 0
        )
    )
    assert stored.facts.disk_tier_bytes == tier["disk_tier_bytes"]
    await until(lambda: first.context.store.exists(all_digests_key(model.digest)))
    cluster.objects[all_digests_key(model.digest)] = await first.context.store.get(
        all_digests_key(model.digest)
    )
    with pytest.raises(DiskTierTaken):
        await cluster.start(**tier, pool_path=cluster.folder / "other")
    await first.stop()

    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    content, times = weights.read_bytes(), weights.stat()
    weights.unlink()
    again = await cluster.start(**tier)
    assert await cluster.lease(model) == list(ALL)
    report = await cluster.heard.report(holds(model.digest))
    assert report.facts.disk_tier_used_bytes >= stored.facts.disk_tier_used_bytes > 0

    def count(event: str) -> float | None:
        return again.context.metrics.get_sample_value(
            "pilotlight_disk_tier_chunks_total", {"event": event}
        )

    assert (count("read"), count("damaged")) == (chunks, 0)
    assert await cluster.drop(model.digest) == (model.digest,)
    torn = next((cluster.folder / "tier").rglob("*.chunk"))
    os.truncate(torn, 1000)
    with pytest.raises(SourceChanged, match="gone"):
        await cluster.lease(model)
    assert count("damaged") == 1
    assert not torn.exists()
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert await cluster.lease(model) == list(ALL)
    await until(torn.exists)


async def test_the_cache_says_which_model_stays_on_the_disk(cluster: Cluster) -> None:
    """There is room for one: the more important one stays, until the other one is."""
    old, new = cluster.register("old"), cluster.register("new", intermediate_size=48)

    def chunks(model: Model) -> int:
        found = msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest)
        return sum(len(part.chunks) for part in found.parts)

    def files() -> set[str]:
        return {path.name for path in (cluster.folder / "tier").rglob("*.chunk")}

    settled = chunks(old)
    loader = await cluster.start(disk_tier_dir=cluster.folder / "tier")
    disk = loader.application.components[0]
    assert isinstance(disk, NodeDisk)

    def count(event: str) -> float:
        name = "pilotlight_disk_tier_chunks_total"
        return loader.context.metrics.get_sample_value(name, {"event": event}) or 0

    await cluster.bus.publish(DISK_ORDER_SUBJECT, DiskOrder(models=(new.digest, old.digest)))
    await cluster.lease(old)
    await cluster.heard.report(lambda report: len(files()) == settled)
    before, disk.tier.limit_bytes = files(), disk.tier.used_bytes
    await cluster.lease(new)
    await until(lambda: count("outranked") > 0)
    assert (files(), count("evicted")) == (before, 0)

    await cluster.bus.publish(DISK_ORDER_SUBJECT, DiskOrder(models=(old.digest, new.digest)))

    async def replaced() -> bool:
        await cluster.drop(new.digest)
        await cluster.lease(new)
        return count("evicted") > 0

    await until(replaced)
    assert before - files()


async def test_what_the_disk_gives_is_known_before_anything_was_read_from_it(
    cluster: Cluster,
) -> None:
    """A probe behind the start tells, as other links' speeds are told."""
    await cluster.start(disk_tier_dir=cluster.folder / "tier", disk_tier_bytes=64 * 1024 * 1024)
    report = await cluster.heard.report(lambda report: report.facts.links)
    (link,) = report.facts.links
    assert (link.kind, link.name) == (OriginKind.DISK, "disk")
    assert link.bytes_per_s > 0
    assert not list((cluster.folder / "tier").rglob("*.chunk"))
