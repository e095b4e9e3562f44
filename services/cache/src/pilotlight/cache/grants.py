"""Room that was promised, by who has it: a cluster has thousands of grants, and each question is
about those of one stage, one worker or one node.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from pilotlight.policy.ids import Digest, Epoch, Generation, GrantId, InstanceId, NodeId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Room that was promised to one stage."""

    grant_id: GrantId
    instance_id: InstanceId
    digest: Digest
    worker_id: WorkerId
    node_id: NodeId
    device_bytes: int
    host_bytes: int
    expires_s: float
    """On this process's monotonic clock."""
    epoch: Epoch = field(default=Epoch(0))
    """Of the leader that asked; 0 where that is not known any more."""
    generation: Generation = field(default=Generation(0))
    """Of the instance's stages that it was made for; 0 where the release that made it did not say.
    """
    since_s: float = 0.0
    """On the same clock: when it was made, or found by a cache that has just been started."""
    host_parts: Mapping[int, int] = field(default_factory=dict[int, int])
    """Parts that it brings to the host pool, with their bytes; none: found by a cache that has just
    been started, or made by a release that does not say."""


_Owned = dict[str, dict[GrantId, Grant]]


class Grants(MutableMapping[GrantId, Grant]):
    """Open grants, in the order in which they came. One owner, the books."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        """``grants``: open by now."""
        self._grants: dict[GrantId, Grant] = {}
        self._of_worker: _Owned = {}
        self._of_node: _Owned = {}
        for grant in grants:
            self[grant.grant_id] = grant

    def of_worker(self, worker_id: WorkerId) -> Collection[Grant]:
        """Those of one device."""
        return self._of_worker.get(worker_id, {}).values()

    def of_node(self, node_id: NodeId) -> Collection[Grant]:
        """Those of one host pool."""
        return self._of_node.get(node_id, {}).values()

    def __getitem__(self, grant_id: GrantId) -> Grant:
        return self._grants[grant_id]

    def __setitem__(self, grant_id: GrantId, grant: Grant) -> None:
        if grant_id in self._grants:
            self._forget(self._grants[grant_id])
        self._grants[grant_id] = grant
        self._of_worker.setdefault(grant.worker_id, {})[grant_id] = grant
        self._of_node.setdefault(grant.node_id, {})[grant_id] = grant

    def __delitem__(self, grant_id: GrantId) -> None:
        self._forget(self._grants.pop(grant_id))

    def __iter__(self) -> Iterator[GrantId]:
        return iter(self._grants)

    def __len__(self) -> int:
        return len(self._grants)

    def _forget(self, grant: Grant) -> None:
        for owned, owner in (
            (self._of_worker, grant.worker_id),
            (self._of_node, grant.node_id),
        ):
            there = owned[owner]
            del there[grant.grant_id]
            if not there:
                del owned[owner]
