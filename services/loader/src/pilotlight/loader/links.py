"""The node's links to other nodes: a door for those that ask for chunks, and a connection to each
one that may be asked.
"""

import asyncio
import socket

import structlog

from pilotlight.common.buckets import NODES
from pilotlight.common.cluster_key import find_cluster_key
from pilotlight.common.errors import BusUnavailable
from pilotlight.common.handshake import LINK_PURPOSE, Identity
from pilotlight.common.messages.hold import Peer
from pilotlight.common.service import Context
from pilotlight.common.waiting import cancel_all, pause
from pilotlight.dataplane.copies import HostCopies
from pilotlight.dataplane.fetch_tools import FetchTools
from pilotlight.dataplane.link.nixl_process import NixlProcess, PoolMemory, takes_nixl
from pilotlight.dataplane.link.offers import Offers
from pilotlight.dataplane.link.peers import Peers
from pilotlight.dataplane.link.server import LinkServer
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.pool import HostPool
from pilotlight.loader.metrics import LoaderMetrics
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.cluster import FetchPriority, NodeFacts
from pilotlight.policy.ids import Digest, NodeId

log = structlog.get_logger()

ANY_ADDRESS = ("", "0.0.0.0", "::")
RETRY_S = 2.0


class NodeLinks:
    """The links' life: nodes are met from start to stop, and what they were being sent is let go of
    before the pool is.
    """

    def __init__(
        self, context: Context[LoaderSettings], me: Identity, metrics: LoaderMetrics
    ) -> None:
        self._context = context
        self._me = me
        self._metrics = metrics
        self._threads = (LinkThread("links-in"), LinkThread("links-out"))
        self._copies: HostCopies | None = None
        self._heard: dict[NodeId, Peer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._server: LinkServer | None = None
        self._nixl: NixlProcess | None = None
        self.peers = Peers(
            me,
            self._threads[0],
            context.clock,
            metrics,
            context.settings.stall_timeout_s,
            priority_of=self._priority_of,
        )

    def listen(self, pool: HostPool, tools: FetchTools, copies: HostCopies) -> None:
        """Take the address, so that it can be reported.

        Raises:
            SettingsInvalid: it cannot be had.
        """
        settings, clock = self._context.settings, self._context.clock
        self._copies = copies
        offers = Offers(pool=pool, copies=copies, moved=tools.moved, clock=clock)
        address = (settings.dataplane_host, settings.dataplane_port)
        if takes_nixl(settings.link_transport):
            memory = PoolMemory(
                pool.descriptor, pool.geometry.data_offset, pool.geometry.file_bytes
            )
            self._nixl = self.peers.memory = NixlProcess(memory, self._threads[0])
        self._server = LinkServer(
            self._me, address, offers, self._threads[1], clock, self._metrics, memory=self._nixl
        )
        self._server.listen()

    @property
    def address(self) -> tuple[str, int]:
        """Where other nodes find this one."""
        host = self._context.settings.dataplane_host
        return (
            socket.gethostname() if host in ANY_ADDRESS else host,
            self._server.port if self._server is not None else 0,
        )

    async def start(self) -> None:
        """Serve, and meet every node that is there or comes."""
        await self.peers.start()
        if self._server is not None:
            await self._server.start()
        if not self._tasks:
            if self._nixl is not None:
                self._threads[0].spawn("NIXL", self._nixl.keep())
            spawn = self._context.background.spawn
            watched = [spawn("links", _watch(thread)) for thread in self._threads]
            self._tasks = [spawn("meet nodes", self._meet_for_ever()), *watched]

    async def stop(self) -> None:
        """Close every connection."""
        tasks, self._tasks = self._tasks, []
        await cancel_all(tasks)
        if self._server is not None:
            await self._server.stop()
        await self.peers.stop()

    async def _meet_for_ever(self) -> None:
        while True:
            try:
                bucket = await self._context.bus.bucket(NODES)
                await bucket.watch(NodeFacts, self._on_node)
            except BusUnavailable as error:
                log.warning(
                    "nodes are not heard of", action="nodes_watch_failed", error=error.message
                )
                await pause(RETRY_S)

    async def _on_node(self, key: str, facts: NodeFacts | None) -> None:
        node_id = NodeId(key)
        if facts is None or not facts.dataplane_host or not facts.dataplane_port:
            self._heard.pop(node_id, None)
            self.peers.part(node_id)
            return
        peer = Peer(node_id=node_id, host=facts.dataplane_host, port=facts.dataplane_port)
        if self._heard.get(node_id) != peer:
            # What is said again is no news: an order may have told of a newer address meanwhile.
            self._heard[node_id] = peer
            self.peers.meet(peer)

    def _priority_of(self, digest: Digest) -> FetchPriority:
        return self._copies.priority(digest) if self._copies is not None else FetchPriority.PREFETCH


async def _watch(thread: LinkThread) -> None:
    """End the process when a task of the links dies, as one of the loader's own would."""
    await asyncio.wrap_future(thread.died)


def find_links(
    context: Context[LoaderSettings], node_id: NodeId, metrics: LoaderMetrics
) -> NodeLinks | None:
    """The node's links; None where it has no cluster key, so that no other node could know it.

    Raises:
        SettingsInvalid: the key is too short.
    """
    key = find_cluster_key(context.settings.secrets_dir, LINK_PURPOSE)
    if key is None:
        log.info(
            "no secret cluster-key: chunks come from no other node and go to none",
            action="links_off",
        )
        return None
    return NodeLinks(context, Identity(node_id, key), metrics)
