"""Scheduler to cache, and cache to worker and loader: room on devices and in host pools.

The cache picks victims, their holder confirms, the cache grants. No grant, no load.
"""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import (
    Digest,
    Epoch,
    Generation,
    GrantId,
    InstanceId,
    ModelName,
    NodeId,
    WorkerId,
)
from pilotlight.policy.lending import Loan

RESERVE_SUBJECT = "v1.cache.reserve"
"""Request/reply: ``Reserve`` → ``Reserved``."""
RELEASE_SUBJECT = "v1.cache.release"
"""Request/reply: ``Release`` → ``Released``."""
GRANT_SETTLED_SUBJECT = "v1.cache.grant-settled"
"""``GrantSettled``, to all schedulers, once for each grant that was promised."""
DISK_ORDER_SUBJECT = "v1.cache.disk-order"
"""``DiskOrder``, to all loaders."""


def give_up_subject(worker_id: WorkerId) -> str:
    """Request/reply: ``GiveUp`` → ``GivenUp``."""
    return f"v1.worker.{worker_id}.give-up"


def lend_subject(worker_id: WorkerId) -> str:
    """``Lend``, whenever loans of the worker's stages are not as they should be."""
    return f"v1.worker.{worker_id}.lend"


def drop_subject(node_id: NodeId) -> str:
    """Request/reply: ``Drop`` → ``Dropped``."""
    return f"v1.loader.{node_id}.drop"


class Reserve(Message, frozen=True, kw_only=True):
    """Room for one stage: on its worker's device and in its node's host pool. Idempotent by
    (instance_id, generation) on a worker: a later generation may ask for more, and its grant takes
    the place of the one before.
    """

    instance_id: InstanceId
    model: ModelName
    digest: Digest
    worker_id: WorkerId
    node_id: NodeId
    device_bytes: int
    host_part_bytes: tuple[int, ...]
    """Of each part that the stage needs: the host pool rounds each up to its own unit."""
    host_parts: tuple[int, ...] = ()
    """Which parts these are; empty: of a release that does not say."""
    lease_s: float
    epoch: Epoch = Epoch(0)
    """Of the leader that asks; one that is older than another that is known is refused. 0: of a
    release that does not say."""
    generation: Generation = Generation(0)
    """Of the instance's stages. 0: of a release that does not say."""
    protected: tuple[InstanceId, ...] = ()
    """Instances on the device that are owed service for their load: they stay. Of them the
    scheduler alone knows."""
    free_room: bool = False
    """No request waits for it: it takes what is free, on the device and in the host pool, and
    nothing goes for it. A release that does not know this has the device's instances in
    ``protected``."""
    promise: bool = False
    """It may be answered before the grant's row is there: ``GrantSettled`` says what became of
    that. A release that does not know this answers when the row is there."""


class Reserved(Message, frozen=True, kw_only=True):
    """The grant; it lapses when no report shows the stage held within the lease."""

    grant_id: GrantId
    evicted_instances: tuple[InstanceId, ...] = ()
    dropped_copies: tuple[Digest, ...] = ()
    written: bool = True
    """Its row is there. False: it is promised, and nothing may be loaded by it yet."""


class GrantSettled(Message, frozen=True, kw_only=True):
    """What became of a promised grant. It may be lost: ``Reserve`` without ``promise`` asks for the
    same, and is answered with the same grant if its row is there.
    """

    grant_id: GrantId
    instance_id: InstanceId
    worker_id: WorkerId
    code: str = ""
    """Of the error by which there is no such grant; empty: it is written."""
    message: str = ""


class Release(Message, frozen=True, kw_only=True):
    """The load is over or given up: a grant is needed no more."""

    grant_id: GrantId


class Released(Message, frozen=True, kw_only=True):
    """Also the answer for a grant that is not known any more."""


class GiveUp(Message, frozen=True, kw_only=True):
    """Unload these idle stages now. One with requests in flight is refused, never cut off."""

    instance_ids: tuple[InstanceId, ...]


class GivenUp(Message, frozen=True, kw_only=True):
    """What was unloaded."""

    instance_ids: tuple[InstanceId, ...]


class Lend(Message, frozen=True, kw_only=True):
    """How much KV beyond their grants a worker's stages may have, all of them: one that is not
    named has no loan. A worker gives a newcomer room without being told.
    """

    worker_id: WorkerId
    loans: tuple[Loan, ...] = ()
    build_bytes: int = 0
    """Room that a build on the device may have; 0: none, and one that has some makes way."""


class Wanted(Message, frozen=True, kw_only=True):
    """Parts of a model for which there must be room in a host pool."""

    digest: Digest
    parts: tuple[int, ...]
    part_bytes: tuple[int, ...]


class Drop(Message, frozen=True, kw_only=True):
    """Free these models' copies in the host pool. One under a lease is refused."""

    digests: tuple[Digest, ...]
    wanted: Wanted | None = None
    """What the room is for. Only the loader knows which free bytes lie in a row."""


class Dropped(Message, frozen=True, kw_only=True):
    """What was freed."""

    digests: tuple[Digest, ...]
    fits: bool = True
    """Whether there is room now for what is wanted, each part in a row."""


class DiskOrder(Message, frozen=True, kw_only=True):
    """In which order disk tiers let go of models: each takes the place of the one before."""

    models: tuple[Digest, ...]
    """The least important first. One that is not named is less important than all of them."""
