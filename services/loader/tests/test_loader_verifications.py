"""A model's source read again, against what is recorded."""

import asyncio
import os

import msgspec
import pytest

from pilotlight.checkpoint.manifest import Manifest
from pilotlight.common.errors import NotFound
from pilotlight.common.messages.verify import (
    AskVerification,
    Verification,
    VerificationStatus,
    Verify,
    verification_subject,
    verify_subject,
)
from pilotlight.common.store import manifest_key
from pilotlight.common.testing import until
from pilotlight.loader.manifests import all_digests_key
from pilotlight.loader.testing import ALL, Cluster, recorded
from pilotlight.policy.model import Model

pytestmark = pytest.mark.anyio


async def verified(cluster: Cluster, model: Model, deadline_s: float = 60.0) -> Verification:
    """Ask for a verification and wait for its end."""
    asked = Verify(model=model, deadline_s=deadline_s)
    found = await cluster.bus.request(
        verify_subject(cluster.node_id), asked, Verification, deadline_s=5
    )
    subject = verification_subject(cluster.node_id)

    async def ended() -> bool:
        nonlocal found
        found = await cluster.bus.request(
            subject,
            AskVerification(verification_id=found.verification_id),
            Verification,
            deadline_s=5,
        )
        return found.status in (VerificationStatus.DONE, VerificationStatus.FAILED)

    await until(ended)
    return found


async def test_a_verification_fills_in_what_nobody_has_recorded(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    assert await cluster.lease(model, (1,)) == [1]
    before = await recorded(running, model, (1,))
    found = await verified(cluster, model)
    assert (found.status, found.filled_parts, found.differences) == (VerificationStatus.DONE, 3, ())
    assert (
        found.done_bytes
        == found.total_bytes
        == sum(file.size_bytes for file in registered_files(cluster, model))
    )
    assert (await recorded(running, model, ALL))[1] == before[1]
    assert await running.context.store.exists(all_digests_key(model.digest))
    again = await verified(cluster, model)
    assert (again.filled_parts, again.difference_count) == (0, 0)
    assert again.verification_id != found.verification_id


def registered_files(cluster: Cluster, model: Model):
    return msgspec.json.decode(cluster.objects[manifest_key(model.digest)], type=Manifest).files


async def test_a_verification_names_what_differs(cluster: Cluster) -> None:
    model = cluster.register()
    running = await cluster.start()
    true = await verified(cluster, model)
    assert true.filled_parts == len(ALL)
    weights = cluster.folder / "models" / "tiny" / "model.safetensors"
    times = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = await verified(cluster, model)
    assert (found.status, found.difference_count, found.filled_parts) == (
        VerificationStatus.DONE,
        1,
        0,
    )
    assert "model.safetensors" in found.differences[0]
    assert found.differences[0].startswith(f"part {ALL[-1]}, bytes [0, ")
    os.utime(weights, ns=(1, 1))
    changed = await verified(cluster, model)
    assert (changed.status, changed.code) == (VerificationStatus.FAILED, "source_changed")
    assert (
        running.context.metrics.get_sample_value(
            "pilotlight_fetches_total", {"code": "corrupt_chunk"}
        )
        == 0
    )


async def test_a_verification_has_a_deadline_and_is_one_at_a_time(cluster: Cluster) -> None:
    model, other = cluster.register(), cluster.register("other", vocab_size=64)
    await cluster.start(link="8kbit")
    subject = verify_subject(cluster.node_id)
    asks = [Verify(model=one, deadline_s=2.0) for one in (model, model, other)]
    first, same, waiting = await asyncio.gather(
        *(cluster.bus.request(subject, ask, Verification, deadline_s=5) for ask in asks)
    )
    assert first.verification_id == same.verification_id != waiting.verification_id
    assert waiting.status is VerificationStatus.WAITING
    found = await verified(cluster, model)
    assert (found.status, found.code) == (VerificationStatus.FAILED, "deadline_exceeded")
    with pytest.raises(NotFound, match="start another"):
        await cluster.bus.request(
            verification_subject(cluster.node_id),
            AskVerification(verification_id="n.gone"),
            Verification,
            deadline_s=5,
        )
