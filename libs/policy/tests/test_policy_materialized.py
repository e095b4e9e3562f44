"""Fingerprints field by field, layouts, and profiles that seed what the scheduler believes."""

from dataclasses import fields, replace

import pytest

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.cuts import usual_ranges
from pilotlight.policy.coldstart.decayed import Point
from pilotlight.policy.coldstart.profiles import seeded
from pilotlight.policy.coldstart.timings import StageSample, Timings
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.materialized import (
    GRAPHS,
    MAX_GRAPHS_BYTES,
    RANGE_GRAPHS,
    Artifact,
    Blob,
    Canary,
    DecodeTime,
    Environment,
    Fingerprint,
    GraphLayout,
    GraphPlace,
    Layout,
    PrefillTime,
    Profile,
    RangeGraphs,
    first_difference,
    range_kind,
)
from pilotlight.policy.model import Dtype, Stage
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


def layers_of(num_layers: int) -> list[tuple[int, int]]:
    spec = replace(MODEL.spec, num_layers=num_layers, part_bytes=(0, *[10] * num_layers, 0))
    return [(one.start, one.stop) for one in usual_ranges(spec)]


def test_usual_ranges_are_halves_and_quarters_as_groups_are_cut() -> None:
    assert layers_of(8) == [(0, 4), (4, 8), (0, 2), (2, 4), (4, 6), (6, 8)]
    assert layers_of(3) == [(0, 2), (2, 3)], "there are too few layers for quarters"
    assert layers_of(1) == []


def with_ranges(kinds: dict[str, Digest], *ranges: RangeGraphs) -> Artifact:
    return Artifact(
        format=1,
        fingerprint=FINGERPRINT,
        layout=Layout(
            device_bytes=2, parameter_bytes=1, kv_bytes_per_token=1, kv_capacity_tokens=1
        ),
        profile=Profile(load_bytes_per_s=1.0, prefill=(), decode=()),
        canary=Canary(prompt_ids=(1,), output_ids=(2,)),
        blobs=tuple(Blob(kind=kind, digest=digest, size_bytes=1) for kind, digest in kinds.items()),
        ranges=ranges,
    )


FIRST, REST = Stage(0, 2), Stage(2, 4)
RANGE_LAYOUT = GraphLayout(slot=3, places=(), pool_bytes=1, trials=())
GIVEN = RangeGraphs(layers=FIRST, graphs=RANGE_LAYOUT)
ONE, TWO = Digest("1" * 64), Digest("2" * 64)


def test_a_stage_finds_the_graphs_of_its_range_and_no_others() -> None:
    artifact = with_ranges(
        {GRAPHS: ONE, range_kind(FIRST): TWO}, GIVEN, RangeGraphs(layers=REST, refused="varies")
    )
    found = artifact.graphs_of(FIRST)
    assert found is not None
    assert (found[0], found[1].digest) == (RANGE_LAYOUT, TWO)
    assert artifact.graphs_of(REST) is None
    assert artifact.graphs_of(Stage(0, 4)) is None
    assert artifact.wrong_ranges() == ""


@pytest.mark.parametrize(
    "artifact",
    [
        with_ranges({range_kind(FIRST): ONE}),
        with_ranges({}, GIVEN),
        with_ranges({range_kind(REST): ONE}, GIVEN),
        with_ranges({range_kind(FIRST): ONE}, GIVEN, GIVEN),
        with_ranges({range_kind(FIRST): ONE}, RangeGraphs(layers=FIRST, refused="varies")),
        with_ranges({}, *(RangeGraphs(layers=Stage(0, 1 + n), refused="x") for n in range(9))),
    ],
    ids=["no layout", "no blob", "another blob", "twice", "refused", "too many"],
)
def test_ranges_that_do_not_hold_together_are_said(artifact: Artifact) -> None:
    assert artifact.wrong_ranges() != ""


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("range_graphs_0_18", RANGE_GRAPHS),
        ("range_graphs_9_18", RANGE_GRAPHS),
        ("range_graphs_09_18", "range_graphs_09_18"),
        ("range_graphs_1_2_3", "range_graphs_1_2_3"),
        ("range_graphs_-1_2", "range_graphs_-1_2"),
        (GRAPHS, GRAPHS),
    ],
)
def test_a_blob_says_what_it_holds(kind: str, holds: str) -> None:
    blob = Blob(kind=kind, digest=ONE, size_bytes=1)
    assert blob.holds == holds
    assert (blob.most_bytes == MAX_GRAPHS_BYTES) is (holds in (GRAPHS, RANGE_GRAPHS))
