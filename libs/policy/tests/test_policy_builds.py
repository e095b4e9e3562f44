"""Which build a worker makes next, and which artifacts are collected."""

from dataclasses import replace

import pytest

from pilotlight.policy.builds import (
    MOST_SHORT,
    TRANSITIONS,
    Build,
    BuildEvent,
    BuildState,
    KeepRules,
    Listed,
    MaterializePolicy,
    Wanted,
    collected,
    needed_bytes,
    next_build,
    sources,
)
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.materialized import Environment, Fingerprint
from pilotlight.policy.testing import environment, model

HERE = environment()
ROOM = 1 << 30
NOW = 1000.0


MODEL = model("a")
FINGERPRINT = Fingerprint.of(HERE, MODEL)
AUTO = Wanted(model=MODEL, policy=MaterializePolicy.AUTO)
ASKED = Wanted(model=MODEL, policy=MaterializePolicy.MANUAL, asked_s=500.0)


def a_build(state: BuildState, **changes: object) -> Build:
    build = Build(
        fingerprint=FINGERPRINT.digest,
        model=MODEL.name,
        model_digest=MODEL.digest,
        state=state,
        attempt=1,
        changed_s=900.0,
    )
    return replace(build, **changes)


def an_artifact(fingerprint: Digest = FINGERPRINT.digest, **changes: object) -> Listed:
    one = Listed(
        fingerprint=fingerprint,
        model_digest=MODEL.digest,
        device_name=HERE.device_name,
        size_bytes=10,
        created_s=600.0,
    )
    return replace(one, **changes)


def chosen(
    *wanted: Wanted,
    build: Build | None = None,
    listed: tuple[Listed, ...] = (),
    room_bytes: int = ROOM,
    environment: Environment = HERE,
) -> ModelName | None:
    builds = {} if build is None else {build.fingerprint: build}
    choice = next_build(wanted, builds, listed, environment, room_bytes=room_bytes, now_s=NOW)
    found = choice.build
    for one in choice.short if found is None else (found, *choice.short):
        assert one.fingerprint == Fingerprint.of(environment, one.model)
        assert one.needed_bytes == needed_bytes(one.model, environment)
    return None if found is None else found.model.name


def test_what_is_wanted_is_built() -> None:
    assert chosen(AUTO) == "a"
    assert chosen(ASKED) == "a"
    assert chosen(Wanted(model=MODEL, policy=MaterializePolicy.MANUAL)) is None
    assert chosen() is None


def test_what_is_listed_is_not_built_again() -> None:
    assert chosen(AUTO, listed=(an_artifact(),)) is None
    asked_again = replace(ASKED, asked_s=700.0)
    assert chosen(asked_again, listed=(an_artifact(),)) is None


def test_a_new_environment_is_a_reason_for_auto_and_none_for_manual() -> None:
    listed = (an_artifact(),)
    newer = replace(HERE, driver="590")
    assert chosen(AUTO, listed=listed, environment=newer) == "a"
    assert chosen(ASKED, listed=listed, environment=newer) is None
    assert chosen(replace(ASKED, asked_s=700.0), listed=listed, environment=newer) == "a"


def test_a_build_has_one_builder() -> None:
    assert chosen(AUTO, build=a_build(BuildState.BUILDING, lease_left_s=1.0)) is None
    assert chosen(AUTO, build=a_build(BuildState.BUILDING, lease_left_s=0.0)) == "a"
    assert chosen(AUTO, build=a_build(BuildState.WAITING)) == "a"
    assert chosen(AUTO, build=a_build(BuildState.BUILT)) is None


def test_one_that_failed_waits_longer_each_time_unless_it_is_asked_for() -> None:
    failed = a_build(BuildState.FAILED)
    assert chosen(AUTO, build=failed) == "a", "its pause of 60 s is over"
    assert chosen(AUTO, build=replace(failed, attempt=2)) is None
    assert chosen(AUTO, build=replace(failed, changed_s=950.0)) is None
    assert chosen(replace(AUTO, asked_s=960.0), build=replace(failed, changed_s=950.0)) == "a"


def test_a_model_that_does_not_fit_is_not_built_here() -> None:
    assert chosen(AUTO, room_bytes=needed_bytes(MODEL, HERE)) == "a"
    assert chosen(AUTO, room_bytes=needed_bytes(MODEL, HERE) - 1) is None


def test_what_has_no_room_is_told_and_is_in_the_way_of_nothing() -> None:
    large = Wanted(
        model=model("large", part_bytes=1000), policy=MaterializePolicy.MANUAL, asked_s=1.0
    )
    failed = a_build(BuildState.FAILED, changed_s=NOW - 1.0)
    room_bytes = needed_bytes(large.model, HERE) - 1
    both = next_build((AUTO, large), {}, (), HERE, room_bytes=room_bytes, now_s=NOW)
    assert both.build is not None
    assert both.build.model is MODEL
    assert [one.model.name for one in both.short] == ["large"]
    nothing = next_build((AUTO, large), {}, (), HERE, room_bytes=0, now_s=NOW)
    assert nothing.build is None
    assert [one.model.name for one in nothing.short] == ["large", "a"], "asked for goes first"
    builds = {failed.fingerprint: failed}
    paused = next_build((AUTO,), builds, (), HERE, room_bytes=0, now_s=NOW)
    assert not paused.short, "it may not begin in any case"


def test_only_so_many_are_told_of() -> None:
    wanted = [replace(AUTO, model=model(f"m{number:02}")) for number in range(2 * MOST_SHORT)]
    choice = next_build(wanted, {}, (), HERE, room_bytes=0, now_s=NOW)
    assert [one.model.name for one in choice.short] == [f"m{n:02}" for n in range(MOST_SHORT)]


def test_on_a_gpu_a_build_has_room_for_what_whole_granules_waste() -> None:
    on_gpu = replace(HERE, device_kind=DeviceKind.CUDA, granule_bytes=2 << 20)
    wasted = needed_bytes(MODEL, on_gpu) - needed_bytes(MODEL, HERE)
    room = stage_room(MODEL, MODEL.spec.whole, 2 << 20)
    assert wasted == room.least_bytes - stage_room(MODEL, MODEL.spec.whole).least_bytes > 0
    assert needed_bytes(MODEL, on_gpu) >= room.least_bytes


def test_the_one_that_was_asked_for_first_goes_first() -> None:
    others = [
        Wanted(model=model("c"), policy=MaterializePolicy.AUTO),
        Wanted(model=model("d"), policy=MaterializePolicy.MANUAL, asked_s=400.0),
    ]
    assert chosen(ASKED, *others) == "d"
    assert chosen(AUTO, others[0]) == "a"


def test_superseded_artifacts_go_by_age_and_by_size() -> None:
    newer = an_artifact(Digest("2" * 64), created_s=900.0)
    old = an_artifact(Digest("1" * 64), created_s=100.0)
    rules = KeepRules(superseded_s=500.0, total_bytes=100)
    models = (MODEL.digest,)
    assert collected((old, newer), models, rules, NOW) == (old.fingerprint,)
    assert collected((old,), models, rules, NOW) == (), "nothing supersedes it"
    young = replace(old, created_s=800.0)
    assert collected((young, newer), models, rules, NOW) == ()
    tight = KeepRules(superseded_s=500.0, total_bytes=19)
    assert collected((young, newer), models, tight, NOW) == (young.fingerprint,)
    elsewhere = replace(young, device_name="another")
    assert collected((elsewhere, newer), models, tight, NOW) == ()
    assert collected((newer,), (), rules, NOW) == (newer.fingerprint,), "its model is gone"


@pytest.mark.parametrize("event", list(BuildEvent))
def test_the_table_says_where_each_event_may_come(event: BuildEvent) -> None:
    assert set(sources(event)) == {state for state, of in TRANSITIONS if of is event and state}
