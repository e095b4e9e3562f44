"""Nodes as one start sees them: with copies of its own model alone.

A node has hundreds of copies, and a tick makes several starts look at the same nodes.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from pilotlight.policy.cluster import Copy, NodeFacts
from pilotlight.policy.ids import Digest, NodeId


class Glances:
    """Of one tick, in which no node changes."""

    def __init__(self, nodes: Mapping[NodeId, NodeFacts]) -> None:
        self._nodes = nodes
        self._bare: dict[NodeId, NodeFacts] = {}
        self._copies: dict[NodeId, Mapping[Digest, tuple[Copy, ...]]] = {}

    def node(self, node_id: NodeId, digest: Digest) -> NodeFacts | None:
        """A node with copies of one model; None where it is not known."""
        node = self._nodes.get(node_id)
        if node is None or not node.copies:
            return node
        if node_id not in self._copies:
            self._copies[node_id] = _by_digest(node)
            self._bare[node_id] = replace(node, copies=())
        copies = self._copies[node_id].get(digest)
        return self._bare[node_id] if copies is None else replace(node, copies=copies)


def _by_digest(node: NodeFacts) -> Mapping[Digest, tuple[Copy, ...]]:
    found = defaultdict[Digest, list[Copy]](list)
    for copy in node.copies:
        found[copy.digest].append(copy)
    return {digest: tuple(copies) for digest, copies in found.items()}
