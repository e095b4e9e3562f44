"""What the parts of a term ask of it, as one interface: tests give them another."""

from collections.abc import Mapping
from typing import Protocol

from pilotlight.policy.cluster import NodeFacts
from pilotlight.policy.ids import GrantId, InstanceId, ModelName, NodeId
from pilotlight.policy.plan import Instance


class Effects(Protocol):
    """A term, to its parts."""

    def check(self) -> None:
        """Before anything is said to others.

        Raises:
            NotLeader: the lease may have run out.
        """

    def instance(self, instance_id: InstanceId) -> Instance | None:
        """An instance as its row says; None when there is none."""
        ...

    def is_awaited(self, model: ModelName) -> bool:
        """Whether some gateway holds requests for a model."""
        ...

    def nodes(self) -> Mapping[NodeId, NodeFacts]:
        """Every node with its liveness."""
        ...

    def release(self, grant_id: GrantId) -> None:
        """Give a grant back, in the background; the end of the term does not stop it."""
