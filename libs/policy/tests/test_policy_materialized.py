"""Fingerprints field by field, layouts, and profiles that seed what the scheduler believes."""

from dataclasses import fields, replace

import pytest

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import Point
from pilotlight.policy.coldstart.profiles import seeded
from pilotlight.policy.coldstart.timings import StageSample, Timings
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.materialized import (
    DecodeTime,
    Environment,
    Fingerprint,
    GraphLayout,
    GraphPlace,
    Layout,
    PrefillTime,
    Profile,
    first_difference,
)
from pilotlight.policy.model import Dtype
from pilotlight.policy.testing import environment, model

HERE, MODEL = environment(), model("a")
FINGERPRINT = Fingerprint.of(HERE, MODEL)
OTHER = {
    "device_kind": DeviceKind.CUDA,
    "memory_bytes": 1,
    "arena_address": 2,
    "granule_bytes": 2,
    "step_tokens": 1,
    "dtype": Dtype.FLOAT16,
    "slot": MODEL.slot + 1,
    "max_context_tokens": 7,
    "model_digest": Digest("c" * 64),
}


@pytest.mark.parametrize("name", [one.name for one in fields(Environment)])
def test_each_field_of_the_environment_is_named(name: str) -> None:
    changed = replace(HERE, **{name: OTHER.get(name, "other")})
    theirs = replace(FINGERPRINT, environment=changed)
    assert first_difference(FINGERPRINT, theirs) == name
    assert theirs.digest != FINGERPRINT.digest


@pytest.mark.parametrize(
    "name", [one.name for one in fields(Fingerprint) if one.name != "environment"]
)
def test_each_field_of_the_model_is_named(name: str) -> None:
    theirs = replace(FINGERPRINT, **{name: OTHER[name]})
    assert first_difference(FINGERPRINT, theirs) == name
    assert theirs.digest != FINGERPRINT.digest


def test_equal_fingerprints_have_one_name() -> None:
    again = Fingerprint.of(replace(HERE), replace(MODEL))
    assert first_difference(FINGERPRINT, again) is None
    assert again.digest == FINGERPRINT.digest
    assert len(again.digest) == 64


def test_a_layout_admits_smaller_rooms_that_are_consistent() -> None:
    layout = Layout(
        device_bytes=1000, parameter_bytes=500, kv_bytes_per_token=1, kv_capacity_tokens=480
    )
    assert layout.admits(1000, 480)
    assert not layout.admits(1000, 464)
    assert layout.admits(800, 288)
    assert not layout.admits(800, 496)
    assert layout.admits(2000, 1480)
    assert not layout.admits(2000, 464)


def test_a_profile_stands_in_for_starts_until_there_is_one() -> None:
    profile = Profile(
        load_bytes_per_s=1e9,
        prefill=(PrefillTime(tokens=100, seconds=1.0), PrefillTime(tokens=200, seconds=2.0)),
        decode=(DecodeTime(batch=1, context_tokens=10, seconds=0.5),),
    )
    timings, taken = seeded(Timings(), [(MODEL, DeviceKind.CPU, profile)])
    assert taken == 1
    assert timings.prefill_s(MODEL, DeviceKind.CPU, 1e9, 150) == pytest.approx(1.5, rel=0.2)
    assert timings.decode_s(MODEL, DeviceKind.CPU, 1e9, 1, 10) == pytest.approx(0.5, rel=0.2)
    assert timings.devices == {}
    assert seeded(timings, [(MODEL, DeviceKind.CPU, profile)]) == (timings, 0)


def test_what_starts_have_shown_stays() -> None:
    shown = StageSample(
        model=MODEL.name,
        device_kind=DeviceKind.CPU,
        node_id=NodeId("n"),
        prefill=Point(100.0, 9.0),
    )
    before = Timings().learned((shown,))
    profile = Profile(
        load_bytes_per_s=0.0, prefill=(PrefillTime(tokens=100, seconds=1.0),), decode=()
    )
    assert seeded(before, [(MODEL, DeviceKind.CPU, profile)]) == (before, 0)


def test_a_layout_of_graphs_names_the_first_place_that_is_elsewhere() -> None:
    places = tuple(
        GraphPlace(name=name, address=address) for name, address in (("hidden", 16), ("words", 32))
    )
    layout = GraphLayout(slot=3, places=places, pool_bytes=1, trials=())
    assert layout.digests == {}
    assert layout.differs(3, {"words": 32, "hidden": 16}) is None
    assert layout.differs(4, {"words": 32, "hidden": 16}) == "slot"
    assert layout.differs(3, {"words": 33, "hidden": 17}) == "hidden"
    assert layout.differs(3, {"hidden": 16}) == "words", "one that is not here"
    assert layout.differs(3, {"hidden": 16, "prompt": 1, "words": 32}) == "prompt", "a new one"
