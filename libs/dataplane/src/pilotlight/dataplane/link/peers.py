"""The nodes that this one knows, and which of them are to be asked for which model: a chain is made
of such askings.

::

    upstreams of C          B, A            asked in this order, for each chunk; then the model's own source
    chain                   A -> B -> C     B gives what A gave it as soon as it is verified; where B dies, A is asked, at the byte
"""

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.common.clock import Clock
from pilotlight.common.handshake import Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.messages.link import Ask
from pilotlight.dataplane.chunk_fill import ChunkWork
from pilotlight.dataplane.link.nixl_process import ReadsMemory
from pilotlight.dataplane.link.peer import PeerLink
from pilotlight.dataplane.link.sender import LinkObserver
from pilotlight.dataplane.link.state import LinkState
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.origin import Origin
from pilotlight.policy.cluster import PEER_LINK, FetchPriority, OriginKind
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.model import Model

log = structlog.get_logger()

MAX_PEERS = 1024
MAX_MODELS = 1024
"""Whose upstreams are remembered."""


@dataclass(frozen=True, slots=True)
class PeerOrigin:
    """One node, as an origin of one model's chunks."""

    peer_link: PeerLink
    manifest: Manifest
    model: Digest
    priority_of: Callable[[Digest], FetchPriority]

    kind = OriginKind.PEER
    trusted = False

    @property
    def name(self) -> str:
        """The node's id."""
        return self.peer_link.peer.node_id

    @property
    def link(self) -> str:
        """One for each node."""
        return f"{PEER_LINK}{self.name}"

    def read(self, part: int, chunk: Chunk, work: ChunkWork) -> None:
        """As ``Origin.read``.

        Without a recorded digest it waits until there is one, and raises ``RecordedNow``.
        """
        chunks = self.manifest.parts[part].chunks
        index = bisect_left(chunks, chunk.image_offset, key=lambda one: one.image_offset)
        model, digest, priority = self.model, work.digest, self.priority_of(self.model)
        ask = Ask(
            model=model,
            part=part,
            chunk=index,
            digest=digest,
            from_byte=work.position,
            priority=priority,
        )
        self.peer_link.pull(ask, work, lambda: self.priority_of(model))


class Peers:
    """``Nearby`` of the nodes. For one event loop, but for the links themselves."""

    def __init__(
        self,
        me: Identity,
        thread: LinkThread,
        clock: Clock,
        observer: LinkObserver,
        stall_timeout_s: float,
        priority_of: Callable[[Digest], FetchPriority],
    ) -> None:
        """There is no link yet.

        Args:
            me: What this node proves to others.
            thread: The links run in it.
            clock: For the links.
            observer: Hears what goes over the links.
            stall_timeout_s: Seconds without a byte after which a pull stalls.
            priority_of: How much a model's fetch matters at this moment, by the model's digest;
                called in the threads that read, too.
        """
        self._me = me
        self._thread = thread
        self._clock = clock
        self._observer = observer
        self._stall_timeout_s = stall_timeout_s
        self._priority_of = priority_of
        self.memory: ReadsMemory | None = None
        """Reads the memory of those that let it be read. For links that are made from then on."""
        self._links: dict[NodeId, PeerLink] = {}
        self._upstreams: OrderedDict[Digest, tuple[NodeId, ...]] = OrderedDict()

    async def start(self) -> None:
        """Links can be made from now on."""
        self._thread.start()

    async def stop(self) -> None:
        """Close every link."""
        self._links.clear()
        await asyncio.to_thread(self._thread.stop)

    @property
    def states(self) -> dict[NodeId, LinkState]:
        """Of every link."""
        return {node_id: link.state for node_id, link in self._links.items()}

    def meet(self, peer: Peer) -> None:
        """A node is there, at this address: make a link to it, and keep it.

        Nothing happens where there is one already.
        """
        if peer.node_id == self._me.node_id:
            return
        known = self._links.get(peer.node_id)
        if known is not None and known.peer == peer:
            return
        if known is None and len(self._links) >= MAX_PEERS:
            log.warning(
                "too many nodes to keep links to",
                action="link_peers_full",
                node=peer.node_id,
                limit=MAX_PEERS,
            )
            return
        self.part(peer.node_id)
        link = PeerLink(
            self._me,
            peer,
            self._thread,
            self._clock,
            self._observer,
            stall_timeout_s=self._stall_timeout_s,
            memory=self.memory,
        )
        self._links[peer.node_id] = link
        self._thread.spawn(_task_of(peer), link.keep())

    def part(self, node_id: NodeId) -> None:
        """A node is gone, or was given another address."""
        link = self._links.pop(node_id, None)
        if link is not None:
            self._thread.cancel(_task_of(link.peer))

    def follow(self, model: Digest, upstreams: Sequence[Peer]) -> None:
        """From now on ask these nodes for a model's chunks, in this order; it stands until other
        ones are told.
        """
        for peer in upstreams:
            self.meet(peer)
        self._upstreams[model] = tuple(
            peer.node_id for peer in upstreams if peer.node_id != self._me.node_id
        )
        self._upstreams.move_to_end(model)
        while len(self._upstreams) > MAX_MODELS:
            self._upstreams.popitem(last=False)

    def origins(self, model: Model, manifest: Manifest) -> Sequence[Origin]:
        """As ``Nearby.origins``: the model's upstreams that can be reached, or may be, in their
        order.
        """
        links = (self._links.get(node_id) for node_id in self._upstreams.get(model.digest, ()))
        usable = (link for link in links if link is not None and _is_usable(link))
        return [PeerOrigin(link, manifest, model.digest, self._priority_of) for link in usable]


def _is_usable(link: PeerLink) -> bool:
    return link.state in (LinkState.UP, LinkState.CONNECTING)


def _task_of(peer: Peer) -> str:
    return f"link to {peer.node_id} at {peer.host}:{peer.port}"
