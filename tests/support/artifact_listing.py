"""Artifacts for workers: signed ones, and a materializer that lists them."""

from dataclasses import replace
from typing import Any

from blake3 import blake3

from pilotlight.common.artifact_signing import sign
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    ArtifactInfo,
    ArtifactsFound,
    FindArtifacts,
)
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.store import ObjectStore, artifact_key
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import (
    Artifact,
    Canary,
    DecodeTime,
    Fingerprint,
    Layout,
    PrefillTime,
    Profile,
)
from pilotlight.policy.model import Model
from pilotlight.policy.testing import environment
from pilotlight.worker.artifacts import MANIFEST
from pilotlight.worker.testing import CLUSTER_KEY, MakeRig, Rig

HERE = environment()


def an_artifact(model: Model, **changes: Any) -> Artifact:
    made = Artifact(
        format=1,
        fingerprint=Fingerprint.of(HERE, model),
        layout=Layout(
            device_bytes=1 << 20,
            parameter_bytes=1 << 18,
            kv_bytes_per_token=128,
            kv_capacity_tokens=4096,
        ),
        profile=Profile(
            load_bytes_per_s=1e9,
            prefill=(PrefillTime(tokens=16, seconds=0.1),),
            decode=(DecodeTime(batch=1, context_tokens=16, seconds=0.1),),
        ),
        canary=Canary(prompt_ids=(1, 2, 3), output_ids=(4, 5)),
    )
    return replace(made, **changes)


def signed(fingerprint: Digest, data: bytes, **changes: Any) -> ArtifactInfo:
    fields: Any = {
        "fingerprint": fingerprint,
        "kind": MANIFEST,
        "blob_digest": Digest(blake3(data).hexdigest()),
        "size_bytes": len(data),
        **changes,
    }
    return ArtifactInfo(**fields, signature=sign(CLUSTER_KEY.encode(), **fields))


class Listing:
    """What the materializer says is listed."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.found = ArtifactsFound(artifacts=())

    async def find(self, request: FindArtifacts) -> ArtifactsFound:
        return self.found

    async def lists(self, artifact: Artifact, **changes: Any) -> ArtifactInfo:
        data = encode_json(artifact)
        info = signed(artifact.fingerprint.digest, data, **changes)
        await self.store.put_if_absent(artifact_key(info.blob_digest), data)
        self.found = ArtifactsFound(artifacts=(info,))
        return info


def restores(rig: Rig) -> dict[tuple[str, str], float]:
    (family,) = rig.worker.core.metrics.restores.collect()
    return {
        (sample.labels["outcome"], sample.labels["field"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def rig_with_graphs(make_rig: MakeRig) -> Rig:
    """A worker that takes graphs from artifacts of this environment."""
    made = await make_rig()
    made.worker.core.environment = HERE
    assert made.worker.artifacts is not None
    made.worker.artifacts._with_graphs = True
    return made


async def listing_of(rig: Rig, connect_bus: Any) -> Listing:
    """What a materializer lists, which the worker asks."""
    made = Listing(rig.worker.core.vocabularies._store)
    bus = await connect_bus("materializer")
    await bus.serve(FIND_ARTIFACTS_SUBJECT, FindArtifacts, made.find)
    return made
