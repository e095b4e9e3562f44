"""Nodes as one start sees them: with copies of its own model alone.

A node has hundreds of copies, and a tick makes several starts look at the same nodes.
"""

from collections.abc import Mapping
from dataclasses import replace

from pilotlight.policy.cluster import NodeFacts
from pilotlight.policy.ids import Digest, NodeId


class Glances:
    """Of one tick, in which no node changes."""

    def __init__(self, nodes: Mapping[NodeId, NodeFacts]) -> None:
        self._nodes = nodes
        self._bare: dict[NodeId, NodeFacts] = {}

    def node(self, node_id: NodeId, digest: Digest) -> NodeFacts | None:
        """A node with copies of one model; None where it is not known."""
        node = self._nodes.get(node_id)
        if node is None or not node.copies:
            return node
        if node_id not in self._bare:
            self._bare[node_id] = replace(node, copies=())
        copies = tuple([one for one in node.copies if one.digest == digest])
        return replace(node, copies=copies) if copies else self._bare[node_id]
