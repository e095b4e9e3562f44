"""A chain of nodes, each with what it took from the model's own source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from gated_link import GatedLink
from linked_nodes import LinkedNode

from pilotlight.checkpoint.checkpoint import read_chunk
from pilotlight.checkpoint.digests import chunk_digest
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.common.messages.hold import Peer
from pilotlight.common.testing import until
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.source_origin import SourceOrigin
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model

ONE = InstanceId("inst-1")
Register = Callable[..., Any]


class CountedSource(SourceOrigin):
    """Counts what is read of it, and can be shut."""

    def __init__(self, model: Model, manifest: Manifest) -> None:
        super().__init__(FolderSource(Path(model.uri.removeprefix("file://"))), manifest, model.uri)
        self.chunks: list[tuple[int, int]] = []
        self.begun: list[int] = []

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        self.chunks.append((part, chunk.image_offset))
        self.begun.append(work.position)
        super().read(part, chunk, work)


class Chain:
    """Nodes of one test, with what each took from the model's own source."""

    def __init__(self, make_node: Callable[..., Any]) -> None:
        self._make_node = make_node
        self.nodes: dict[str, LinkedNode] = {}
        self.sources: dict[str, list[CountedSource]] = {}
        self.gates: list[GatedLink] = []

    async def add(self, name: str, **options: Any) -> LinkedNode:
        linked = LinkedNode(
            name,
            **{
                key: options.pop(key)
                for key in ("key", "clock", "stall_timeout_s")
                if key in options
            },
        )
        opened = self.sources[name] = []

        def open_source(model: Model, manifest: Manifest) -> CountedSource:
            opened.append(CountedSource(model, manifest))
            return opened[-1]

        node = self._make_node(open_source=open_source, nearby=[linked.peers], **options)
        await linked.start(node, node.tools, node.copies)
        self.nodes[name] = linked
        return linked

    def taken(self, name: str) -> list[tuple[int, int]]:
        return [chunk for source in self.sources[name] for chunk in source.chunks]

    async def stop(self) -> None:
        for gate in self.gates:
            await gate.cut()
        for linked in self.nodes.values():
            await linked.stop()


def large(register: Register, **changes: Any) -> Any:
    """A model with layers of several chunks, and every digest recorded."""
    registered = register(
        hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=2, **changes
    )
    source = FolderSource(registered.folder)
    registered.manifest = registered.manifest.with_digests(
        {
            (p, c): chunk_digest(read_chunk(source, registered.manifest, chunk))
            for p, part in enumerate(registered.manifest.parts)
            for c, chunk in enumerate(part.chunks)
        }
    )
    return registered


def image_of(linked: LinkedNode, registered: Any, part: int) -> bytes:
    pool = linked.node.pool
    image = pool.find(registered.model.digest, part)
    with pool.view(image, 0, image.image_bytes) as view:
        return bytes(view)


def expected(registered: Any, part: int) -> bytes:
    source = FolderSource(registered.folder)
    return b"".join(
        read_chunk(source, registered.manifest, chunk)
        for chunk in registered.manifest.parts[part].chunks
    )


async def whole(linked: LinkedNode, claim: Any) -> None:
    await until(lambda: not claim.missing or claim.error is not None, deadline_s=30.0)
    assert claim.error is None


def strip(manifest: Manifest) -> Manifest:
    """The manifest as it is before a node has read the model."""
    parts = [
        msgspec.structs.replace(
            part, chunks=tuple(msgspec.structs.replace(chunk, digest=None) for chunk in part.chunks)
        )
        for part in manifest.parts
    ]
    return msgspec.structs.replace(manifest, parts=tuple(parts))


def order(
    linked: LinkedNode,
    registered: Any,
    upstreams: list[Any],
    parts: Any = None,
    *,
    priority: FetchPriority = FetchPriority.COLD_START,
) -> Any:
    """What the loader does with an order of the scheduler."""
    linked.node.add(registered)
    peers = [
        upstream.peer if isinstance(upstream, LinkedNode) else upstream for upstream in upstreams
    ]
    linked.peers.follow(registered.model.digest, peers)
    parts = range(len(registered.manifest.parts)) if parts is None else parts
    return linked.node.copies.claim(registered.model, parts, ONE, leased=False, priority=priority)


async def gated(
    chain: Chain, linked: LinkedNode, allowed_bytes: int | None
) -> tuple[GatedLink, Peer]:
    gate = GatedLink(allowed_bytes)
    chain.gates.append(gate)
    return gate, await gate.start(linked.peer)
