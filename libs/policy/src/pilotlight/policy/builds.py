"""Builds of artifacts: their states, which one a worker makes next, which artifacts are collected.

``docs/states.md`` is rendered from ``TRANSITIONS``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import Digest, ModelName
from pilotlight.policy.materialized import Environment, Fingerprint
from pilotlight.policy.model import Model

RETRY_FIRST_S, RETRY_MAX_S = 60.0, 3600.0
"""After a build that failed; doubled with each one, unless somebody asks for it anew."""


class MaterializePolicy(StrEnum):
    """When a model's artifacts are built."""

    MANUAL = "manual"
    """When an operator asks."""
    AUTO = "auto"
    """For each environment in which a worker has time, at once and after each change of it."""


class BuildState(StrEnum):
    """Of the build of one fingerprint."""

    WAITING = "waiting"
    BUILDING = "building"
    BUILT = "built"
    FAILED = "failed"


class BuildEvent(StrEnum):
    """What can happen to a build."""

    CLAIM = "claim"
    """A worker with time takes it, for as long as it renews its lease."""
    FINISH = "finish"
    """Its artifact is signed and listed."""
    YIELD = "yield"
    """Its worker is to serve a model: demand goes first."""
    EXPIRE = "expire"
    """Its worker renews its lease no longer: it died, or is cut off."""
    FAIL = "fail"
    """It cannot be made; it is tried again later."""
    NO_ROOM = "no_room"
    """It may begin, and a worker with time has no room for it, or not yet: that is no try of it.
    """
    COLLECT = "collect"
    """Its artifact is superseded, too old, or of a model that is gone."""


_S, _E = BuildState, BuildEvent

TRANSITIONS: dict[tuple[BuildState | None, BuildEvent], BuildState | None] = {
    (None, _E.CLAIM): _S.BUILDING,
    (None, _E.NO_ROOM): _S.WAITING,
    (_S.WAITING, _E.NO_ROOM): _S.WAITING,
    (_S.FAILED, _E.NO_ROOM): _S.WAITING,
    (_S.WAITING, _E.CLAIM): _S.BUILDING,
    (_S.FAILED, _E.CLAIM): _S.BUILDING,
    (_S.BUILDING, _E.FINISH): _S.BUILT,
    (_S.BUILDING, _E.YIELD): _S.WAITING,
    (_S.BUILDING, _E.EXPIRE): _S.WAITING,
    (_S.BUILDING, _E.FAIL): _S.FAILED,
    (_S.BUILT, _E.COLLECT): None,
    (_S.WAITING, _E.COLLECT): None,
    (_S.FAILED, _E.COLLECT): None,
}


def sources(event: BuildEvent) -> tuple[BuildState, ...]:
    """The states in which an event may come: the condition of the row's ``UPDATE``."""
    return tuple(
        state for (state, of), _ in TRANSITIONS.items() if of is event and state is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A model of which artifacts may be wanted. Times are seconds of one clock."""

    model: Model
    policy: MaterializePolicy
    asked_s: float | None = None
    """When an operator last asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The build of one fingerprint, as its row says."""

    fingerprint: Digest
    model: ModelName
    model_digest: Digest
    state: BuildState
    attempt: int
    changed_s: float
    lease_left_s: float = 0.0
    """Until another worker may take it; only while it is being built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An artifact that is listed."""

    fingerprint: Digest
    model_digest: Digest
    device_name: str
    size_bytes: int
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBuild:
    """A build that can begin where it has room."""

    model: Model
    fingerprint: Fingerprint
    needed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildChoice:
    """What a worker with time builds, and what waits for room."""

    build: NextBuild | None = None
    """The first for which there is room, or could be."""
    short: tuple[NextBuild, ...] = ()
    """Those for which there cannot be, the first of them."""


MOST_SHORT = 16
"""As many are told of; the others are when those are built, or gone."""


def next_build(
    wanted: Iterable[Wanted],
    builds: Mapping[Digest, Build],
    listed: Iterable[Listed],
    environment: Environment,
    *,
    room_bytes: int,
    now_s: float,
) -> BuildChoice:
    """What a worker with time builds next.

    1. A model whose artifact for this environment is listed needs none.
    2. ``manual`` and never asked for, or asked for before the last artifact was made: none.
    3. One that does not fit into what the worker could have: not here, and not now.
    4. One that another worker builds: not now. One that failed: when its pause is over, or it was
       asked for since.
    5. Of the others those that were asked for go first, the oldest before.

    Args:
        wanted: the registered models.
        builds: by fingerprint.
        listed: every artifact.
        environment: the worker's.
        room_bytes: of its device, what is granted to nothing.
        now_s: on the clock of the other times.
    """
    artifacts = tuple(listed)
    have = {one.fingerprint for one in artifacts}
    newest: dict[Digest, float] = {}
    for one in artifacts:
        newest[one.model_digest] = max(one.created_s, newest.get(one.model_digest, 0.0))
    found: list[tuple[float, NextBuild]] = []
    for one in wanted:
        fingerprint = Fingerprint.of(environment, one.model)
        if fingerprint.digest in have:  # 1
            continue
        asked_s = one.asked_s
        if one.policy is MaterializePolicy.MANUAL and (
            asked_s is None or asked_s <= newest.get(one.model.digest, 0.0)
        ):  # 2
            continue
        build = builds.get(fingerprint.digest)
        if build is not None and not _may_begin(build, asked_s, now_s):  # 4
            continue
        needed = needed_bytes(one.model, environment)
        choice = NextBuild(model=one.model, fingerprint=fingerprint, needed_bytes=needed)
        found.append((now_s if asked_s is None else asked_s, choice))
    found.sort(key=lambda one: (one[0], one[1].model.name))  # 5
    short = [one for _, one in found if one.needed_bytes > room_bytes]  # 3
    build = next((one for _, one in found if one.needed_bytes <= room_bytes), None)
    return BuildChoice(build=build, short=tuple(short[:MOST_SHORT]))


def needed_bytes(model: Model, environment: Environment) -> int:
    """Of device memory, what a build takes: parameters, and KV for the profile's largest batch."""
    spec = model.spec
    kv_tokens = 2 * spec.max_context_tokens
    kv_bytes = kv_tokens * spec.kv_bytes_per_token(spec.whole, model.dtype)
    on_gpu = environment.device_kind is DeviceKind.CUDA
    # What whole granules waste at most: see ``cost.stage_room``.
    granules = len(spec.parts_of(spec.whole)) + 2 * spec.num_layers if on_gpu else 0
    wasted_bytes = granules * (environment.granule_bytes - 1)
    needed = model.device_bytes(spec.whole) + min(kv_bytes, MAX_KV_BYTES)
    return needed + wasted_bytes + SPARE_BYTES


MAX_KV_BYTES = 1 << 30
SPARE_BYTES = 1 << 20
"""For a block of KV more."""


def _may_begin(build: Build, asked_s: float | None, now_s: float) -> bool:
    match build.state:
        case BuildState.BUILDING:
            return build.lease_left_s <= 0
        case BuildState.FAILED:
            pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(16, max(0, build.attempt - 1)))
            asked_since = asked_s is not None and asked_s > build.changed_s
            return asked_since or now_s - build.changed_s >= pause_s
        case BuildState.WAITING:
            return True
        case BuildState.BUILT:
            # And nothing is listed: it was removed, and its row goes with the next collection.
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """What is kept of artifacts that no start would find first."""

    superseded_s: float
    """Age at which a superseded one goes."""
    total_bytes: int
    """Of all together; superseded ones go before that, the oldest first."""


def collected(
    listed: Iterable[Listed], models: Iterable[Digest], rules: KeepRules, now_s: float
) -> tuple[Digest, ...]:
    """Fingerprints of the artifacts that go.

    1. Those of models that are registered no more.
    2. Superseded ones (of the same model on the same type of device there is a newer one) that are
       old.
    3. More superseded ones, the oldest first, while all together take too much.

    Args:
        listed: every artifact.
        models: digests of the registered models.
        rules: what is kept.
        now_s: on the clock of their times.
    """
    registered = set(models)
    artifacts = sorted(listed, key=lambda one: one.created_s)
    newest = {(one.model_digest, one.device_name): one.fingerprint for one in artifacts}
    gone: dict[Digest, None] = {}
    total_bytes = sum(one.size_bytes for one in artifacts)
    for one in artifacts:
        superseded = newest[one.model_digest, one.device_name] != one.fingerprint
        goes = one.model_digest not in registered  # 1
        goes = goes or (superseded and now_s - one.created_s >= rules.superseded_s)  # 2
        goes = goes or (superseded and total_bytes > rules.total_bytes)  # 3
        if goes:
            gone[one.fingerprint] = None
            total_bytes -= one.size_bytes
    return tuple(gone)
