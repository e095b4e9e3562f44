"""The disk tier of a node, from one loader to the next."""

import os

import msgspec
import pytest

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.common.errors import DiskTierTaken, SourceChanged
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import until
from pilotlight.loader.manifests import all_digests_key
from pilotlight.loader.testing import ALL, Cluster, holds

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
        lambda report: len(list((cluster.folder / "tier").rglob("*.chunk"))) == chunks
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
