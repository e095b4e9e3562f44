"""Artifacts are used whole, signed and of the same fingerprint, or refused by the name of what is
wrong; whatever their bytes are.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from artifact_listing import HERE, Listing, an_artifact, restores, signed
from manifest_fuzz import MUTATIONS, mutated

from pilotlight.common.errors import RestoreFailed
from pilotlight.common.messages.artifacts import (
    FIND_ARTIFACTS_SUBJECT,
    ArtifactsFound,
    FindArtifacts,
)
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.events import EVENT_SUBJECTS, Event
from pilotlight.common.store import artifact_key
from pilotlight.common.testing import until
from pilotlight.engine.results import StageRoom
from pilotlight.policy.cluster import HeldState
from pilotlight.policy.ids import Digest, InstanceId
from pilotlight.policy.materialized import (
    Artifact,
    Fingerprint,
)
from pilotlight.policy.model import Dtype, Model
from pilotlight.policy.phase import PhaseName
from pilotlight.worker.engine_child.restoring import Restoring
from pilotlight.worker.found import Found
from pilotlight.worker.manifests import Refused, checked
from pilotlight.worker.testing import CLUSTER_KEY, MakeRig, Rig


def with_driver(artifact: Artifact, driver: str = "other") -> Artifact:
    changed = replace(artifact.fingerprint.environment, driver=driver)
    return replace(artifact, fingerprint=replace(artifact.fingerprint, environment=changed))


def test_no_mutation_of_a_manifest_does_more_than_be_refused(model: Model) -> None:
    """Signed as it is, so that nothing but the parser stands in its way."""
    good = an_artifact(model)
    data, rng = encode_json(good), random.Random(19)
    outcomes: dict[str, int] = {}
    room = StageRoom(
        parts=(0,), parameter_bytes=1 << 18, kv_bytes_per_token=128, kv_capacity_tokens=4096
    )
    for _ in range(MUTATIONS):
        changed = mutated(data, rng)
        info = signed(good.fingerprint.digest, changed)
        try:
            found = checked(info, changed, good.fingerprint, CLUSTER_KEY.encode())
        except Refused as refused:
            outcomes[refused.field] = outcomes.get(refused.field, 0) + 1
        else:
            assert found.fingerprint == good.fingerprint
            outcomes["taken"] = outcomes.get("taken", 0) + 1
        try:
            Restoring().begin(InstanceId("i"), changed, 1 << 20, room)
        except RestoreFailed:
            outcomes["child"] = outcomes.get("child", 0) + 1
    assert outcomes["manifest"] > MUTATIONS / 4
    assert outcomes["child"] > MUTATIONS / 4
    assert {"driver", "model_digest"} & set(outcomes), "some are of another fingerprint"


def test_each_field_of_a_signature_matters(model: Model) -> None:
    good = an_artifact(model)
    data, key = encode_json(good), CLUSTER_KEY.encode()
    info = signed(good.fingerprint.digest, data)
    assert checked(info, data, good.fingerprint, key) == good
    for changes in (
        {"signature": "0" * 64},
        {"kind": "graphs"},
        {"fingerprint": Digest("0" * 64)},
        {"blob_digest": Digest("0" * 64)},
        {"size_bytes": 1},
    ):
        with pytest.raises(Refused, match="signature"):
            checked(msgspec.structs.replace(info, **changes), data, good.fingerprint, key)
    with pytest.raises(Refused, match="signature"):
        checked(info, data, good.fingerprint, b"another key")
    with pytest.raises(Refused, match="fingerprint"):
        checked(signed(Digest("0" * 64), data), data, good.fingerprint, key)


def test_a_manifest_of_a_release_without_miss_penalties_is_as_good_as_before(model: Model) -> None:
    good = an_artifact(model)
    told = msgspec.json.decode(encode_json(good))
    for name in ("load_s", "init_s", "restore_s"):
        del told["profile"][name]
    old = msgspec.json.encode(told)
    found = checked(
        signed(good.fingerprint.digest, old), old, good.fingerprint, CLUSTER_KEY.encode()
    )
    assert found == good
    assert (found.profile.load_s, found.profile.init_s, found.profile.restore_s) == (0.0, 0.0, 0.0)


def test_one_bit_of_any_byte_of_a_manifest_refuses_it(model: Model) -> None:
    good = an_artifact(model)
    data, key = encode_json(good), CLUSTER_KEY.encode()
    info = signed(good.fingerprint.digest, data)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with pytest.raises(Refused, match="digest"):
            checked(info, bytes(changed), good.fingerprint, key)


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    made = await make_rig()
    made.worker.core.environment = HERE
    return made


@pytest.fixture
async def listing(rig: Rig, connect_bus: Any) -> Listing:
    made = Listing(rig.worker.core.vocabularies._store)  # the rig has it nowhere else
    bus = await connect_bus("materializer")
    await bus.serve(FIND_ARTIFACTS_SUBJECT, FindArtifacts, made.find)
    return made


async def foreign(listing: Listing, good: Artifact) -> None:
    info = await listing.lists(good)
    listing.found = ArtifactsFound(artifacts=(msgspec.structs.replace(info, signature="0" * 64),))


async def longer(listing: Listing, good: Artifact) -> None:
    await listing.lists(good, size_bytes=1)


async def flipped(listing: Listing, good: Artifact) -> None:
    data = bytearray(encode_json(good))
    info = signed(good.fingerprint.digest, bytes(data))
    data[len(data) // 2] ^= 1
    await listing.store.put_if_absent(artifact_key(info.blob_digest), bytes(data))
    listing.found = ArtifactsFound(artifacts=(info,))


async def newer(listing: Listing, good: Artifact) -> None:
    await listing.lists(replace(good, format=2))


async def of_another_driver(listing: Listing, good: Artifact) -> None:
    await listing.lists(with_driver(good))


async def of_another_engine(listing: Listing, good: Artifact) -> None:
    changed = replace(good.fingerprint.environment, engine="0.0.1 " + "0" * 16)
    await listing.lists(replace(good, fingerprint=replace(good.fingerprint, environment=changed)))


async def of_another_digest(listing: Listing, good: Artifact) -> None:
    await listing.lists(of_another_model(good, model_digest=Digest("9" * 64)))


async def of_another_dtype(listing: Listing, good: Artifact) -> None:
    await listing.lists(of_another_model(good, dtype=Dtype.FLOAT16))


async def of_another_slot(listing: Listing, good: Artifact) -> None:
    await listing.lists(of_another_model(good, slot=good.fingerprint.slot + 1))


def of_another_model(good: Artifact, **changes: Any) -> Artifact:
    return replace(good, fingerprint=replace(good.fingerprint, **changes))


async def nearly(listing: Listing, good: Artifact) -> None:
    listing.found = ArtifactsFound(artifacts=(), nearest=with_driver(good).fingerprint)


Prepare = Callable[[Listing, Artifact], Any]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prepare", "field"),
    [
        (foreign, "signature"),
        (longer, "size"),
        (flipped, "digest"),
        (newer, "format"),
        (of_another_driver, "driver"),
        (of_another_engine, "engine"),
        (of_another_digest, "model_digest"),
        (of_another_dtype, "dtype"),
        (of_another_slot, "slot"),
        (nearly, "driver"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name_and_the_start_is_a_normal_one(
    rig: Rig, listing: Listing, prepare: Prepare, field: str
) -> None:
    events: list[Event] = []

    async def on_event(event: Event) -> None:
        events.append(event)

    await rig.bus.subscribe(EVENT_SUBJECTS, Event, on_event)
    await prepare(listing, an_artifact(rig.model))
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    await rig.until(lambda: PhaseName.INIT in rig.phases)
    assert PhaseName.RESTORE not in rig.phases
    assert restores(rig) == {("refused", field): 1.0}
    await until(lambda: events)
    assert (events[0].kind, events[0].data["field"]) == ("restore_refused", field)


@pytest.mark.anyio
@pytest.mark.parametrize("key", [None, CLUSTER_KEY])
async def test_where_nothing_is_listed_or_can_be_checked_a_start_is_a_normal_one(
    rig: Rig, listing: Listing, key: str | None
) -> None:
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    if key is None:
        artifacts._cluster_key = None  # a worker without the secret
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    await rig.until(lambda: PhaseName.INIT in rig.phases)
    assert restores(rig) == ({} if key is None else {("none", ""): 1.0})


@pytest.mark.anyio
async def test_without_a_materializer_a_start_is_a_normal_one(rig: Rig) -> None:
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    assert restores(rig) == {("unreachable", ""): 1.0}


@pytest.mark.anyio
async def test_what_is_listed_is_given_to_the_engine_once_it_is_found(
    rig: Rig, listing: Listing
) -> None:
    await listing.lists(an_artifact(rig.model))
    await rig.command(rig.a_hold())
    await rig.state(HeldState.READY)
    await rig.until(lambda: PhaseName.RESTORE in rig.phases)
    assert restores(rig) == {("found", ""): 1.0}
    artifacts = rig.worker.artifacts
    assert artifacts is not None
    listing.found = ArtifactsFound(artifacts=())
    at_once = artifacts.at_once(rig.a_hold("inst-2"))
    assert at_once is not None
    assert at_once.manifest, "it is remembered"
    assert await artifacts.of(rig.a_hold("inst-2")) == at_once
    artifacts.on_engine_died(RestoreFailed.code)
    assert await artifacts.of(rig.a_hold("inst-3")) == Found(), "and not trusted any more"
    assert artifacts.at_once(rig.a_hold("inst-3")) is None
    artifacts.forget(Fingerprint.of(HERE, rig.model).digest)
    assert await artifacts.of(rig.a_hold("inst-4")) == Found(), "it is looked for again"
    assert restores(rig)["none", ""] == 1.0
