"""Nodes with links between them, in one process: each with a pool, a fetch core, a server and its
own threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.cluster_key import ClusterKey
from pilotlight.common.handshake import LINK_PURPOSE, Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.waiting import Backoff
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.link.nixl_process import NixlProcess, PoolMemory
from pilotlight.dataplane.link.offers import Offers
from pilotlight.dataplane.link.peers import Peers
from pilotlight.dataplane.link.server import LinkServer
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import Digest, NodeId

KEY = ClusterKey(b"the key of this cluster", LINK_PURPOSE)
HOST = "127.0.0.1"


@dataclass
class Traffic:
    """What went over a node's links."""

    sent: dict[str, int] = field(default_factory=dict[str, int])
    received: dict[str, int] = field(default_factory=dict[str, int])
    refused: int = 0

    def on_sent(self, node_id: NodeId, size_bytes: int) -> None:
        self.sent[node_id] = self.sent.get(node_id, 0) + size_bytes

    def on_received(self, node_id: NodeId, size_bytes: int) -> None:
        self.received[node_id] = self.received.get(node_id, 0) + size_bytes

    def on_refused(self) -> None:
        self.refused += 1


class LinkedNode:
    """Links around what ``make_node`` of the data plane's tests gives, or anything like it."""

    def __init__(
        self,
        name: str,
        *,
        key: ClusterKey = KEY,
        clock: Clock | None = None,
        stall_timeout_s: float = 10.0,
        host: str = HOST,
        reader: Sequence[str] = (),
    ) -> None:
        """``reader`` starts the process that reads other nodes' memory; without one bytes go over
        TCP.
        """
        self.me = Identity(NodeId(name), key)
        self.traffic = Traffic()
        self.node: Any = None
        self.copies: HostCopies | None = None
        self._host = host
        self._clock = clock or SystemClock()
        self._in = LinkThread(f"links-in-{name}")
        self._out = LinkThread(f"links-out-{name}")
        self.peers = Peers(
            self.me, self._in, self._clock, self.traffic, stall_timeout_s, self._priority
        )
        self.server: LinkServer | None = None
        self.nixl: NixlProcess | None = None
        self._reader = reader

    async def start(self, node: Any, tools: FetchTools, copies: HostCopies, port: int = 0) -> None:
        """Listen, and let the fetches of ``node`` use the links."""
        self.node, self.copies = node, copies
        await self.peers.start()
        offers = Offers(pool=tools.pool, copies=copies, moved=tools.moved, clock=self._clock)
        if self._reader:
            memory = PoolMemory(
                tools.pool.descriptor,
                tools.pool.geometry.data_offset,
                tools.pool.geometry.file_bytes,
            )
            self.nixl = self.peers.memory = NixlProcess(
                memory, self._in, command=self._reader, slots=16, backoff=Backoff(first_s=0.1)
            )
            self._in.spawn("NIXL", self.nixl.keep())
        address = (self._host, port)
        self.server = LinkServer(
            self.me, address, offers, self._out, self._clock, self.traffic, memory=self.nixl
        )
        await self.server.start()

    async def stop(self) -> None:
        """As a node that is shut down in order."""
        if self.server is not None:
            await self.server.stop()
        await self.peers.stop()

    @property
    def peer(self) -> Peer:
        """Where the others find it."""
        assert self.server is not None
        return Peer(node_id=self.me.node_id, host=self._host, port=self.server.port)

    def _priority(self, digest: Digest) -> FetchPriority:
        assert self.copies is not None
        return self.copies.priority(digest)
