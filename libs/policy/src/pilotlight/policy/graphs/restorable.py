"""What a graph may consist of if it is to be restored, decided when it is built: what cannot come
back is refused by its name, not met in a cold start.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class NodeType(IntEnum):
    """Of a graph's node, with the driver's numbers (``CUgraphNodeType``)."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    GRAPH = 4
    EMPTY = 5
    WAIT_EVENT = 6
    EVENT_RECORD = 7
    EXT_SEMAS_SIGNAL = 8
    EXT_SEMAS_WAIT = 9
    MEM_ALLOC = 10
    MEM_FREE = 11
    BATCH_MEM_OP = 12
    CONDITIONAL = 13


RESTORABLE = frozenset({NodeType.KERNEL, NodeType.MEMCPY, NodeType.MEMSET, NodeType.EMPTY})
"""All others hold what is valid in one process: functions, events, memory of their own."""
RANDOM = ("philox", "curand", "distribution_", "dropout", "random_", "randperm", "bernoulli")
"""In names of kernels that read a generator's state. torch writes that into the graph's inputs at
each replay, which a launch by the driver leaves out: the same numbers would come again and again.
"""


@dataclass(frozen=True, slots=True)
class Node:
    """Of a graph: its type as the driver says, and its kernel, if it is one."""

    type: int
    kernel: str = ""


class NotRestorable(Exception):
    """A graph has something that no other process can have; ``what`` is its name."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(message)
        self.what = what


def require_restorable(nodes: Iterable[Node], images: Mapping[str, Collection[str]]) -> None:
    """Refuses a graph that cannot be restored.

    Args:
        nodes: of the graph.
        images: kernels of each image that was recorded.

    Raises:
        NotRestorable: by the name of the node's type, by ``random``, or by ``image``: of a kernel
            no image was recorded.
    """
    there = {name for kernels in images.values() for name in kernels}
    for number, node in enumerate(nodes):
        known = node.type in frozenset(NodeType)
        kind = NodeType(node.type).name.lower() if known else f"type_{node.type}"
        if not known or node.type not in RESTORABLE:
            raise NotRestorable(kind, f"node {number} is of type {kind}")
        if node.type != NodeType.KERNEL:
            continue
        lower = node.kernel.lower()
        if any(word in lower for word in RANDOM):
            raise NotRestorable("random", f"node {number}, {node.kernel}, draws random numbers")
        if node.kernel not in there:
            raise NotRestorable("image", f"no recorded image has {node.kernel} of node {number}")


def used_images(
    nodes: Iterable[Node], images: Mapping[str, Collection[str]]
) -> dict[str, Sequence[str]]:
    """Which images are kept, and which of their kernels: all others are pruned.

    A kernel that several images have is taken from one that is kept anyway, or else from the one
    with the fewest kernels.

    Args:
        nodes: of all graphs, each of whose kernels some image has.
        images: kernels of each image that was recorded.
    """
    wanted = {node.kernel for node in nodes if node.type == NodeType.KERNEL}
    having = {
        kernel: [image for image, kernels in images.items() if kernel in kernels]
        for kernel in wanted
    }
    kept: dict[str, list[str]] = {}
    # Those that only one image has decide first.
    for kernel in sorted(wanted, key=lambda kernel: (len(having[kernel]), kernel)):
        choice = min(
            having[kernel], key=lambda image: (image not in kept, len(images[image]), image)
        )
        kept.setdefault(choice, []).append(kernel)
    return {image: sorted(kernels) for image, kernels in sorted(kept.items())}
