"""The node's server for others: listens, proves the cluster's key and has it proved, then sends
chunks of the host pool.
"""

import asyncio
import socket
from contextlib import suppress

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.errors import PeerRefused, PilotlightError, SettingsInvalid
from pilotlight.common.handshake import Identity, Responder
from pilotlight.common.messages.link import Hello, Proof, Refused
from pilotlight.common.waiting import cancel_all, pause, within
from pilotlight.dataplane.link.offers import Offers
from pilotlight.dataplane.link.sender import LinkObserver, ReadableMemory, Sender
from pilotlight.dataplane.link.stream import FrameStream
from pilotlight.dataplane.link.thread import LinkThread
from pilotlight.dataplane.link.yielding import Yielding

log = structlog.get_logger()

MAX_CONNECTIONS = 1024
HANDSHAKE_S = 5.0
BACKLOG = 128
ACCEPT_AGAIN_S = 0.1


class LinkServer:
    """Gives this node's chunks to others."""

    def __init__(
        self,
        me: Identity,
        address: tuple[str, int],
        offers: Offers,
        thread: LinkThread,
        clock: Clock,
        observer: LinkObserver,
        *,
        handshake_s: float = HANDSHAKE_S,
        memory: ReadableMemory | None = None,
    ) -> None:
        """Nothing is listened to yet.

        Args:
            me: What this node proves to others.
            address: Host and port to listen on; port 0 means any.
            offers: Finds the chunks that are asked for.
            thread: Connections are served in it.
            clock: For the connections.
            observer: Hears of bytes that go and of connections that are refused.
            handshake_s: Seconds that a node has for its handshake.
            memory: Lets nodes that can read the pool themselves; None: none may.
        """
        self._me = me
        self._address = address
        self._offers = offers
        self._thread = thread
        self._clock = clock
        self._observer = observer
        self._handshake_s = handshake_s
        self._memory = memory
        self._yielding = Yielding()
        self._listener: socket.socket | None = None
        self._pool_loop: asyncio.AbstractEventLoop | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens; 0 before it does."""
        return self._listener.getsockname()[1] if self._listener is not None else 0

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def listen(self) -> None:
        """Take the address; connections wait until ``start``.

        Raises:
            SettingsInvalid: it cannot be had.
        """
        if self._listener is not None:
            return
        host, port = self._address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise SettingsInvalid(
                f"other nodes cannot be listened to at {host}:{port} (PILOTLIGHT_DATAPLANE_HOST, PILOTLIGHT_DATAPLANE_PORT): {error}"
            ) from error
        self._listener.setblocking(False)

    async def start(self) -> None:
        """Serve, from the event loop of the pool."""
        self.listen()
        if self._pool_loop is None and self._listener is not None:
            self._pool_loop = asyncio.get_running_loop()
            self._thread.start()
            self._thread.spawn(
                "accept nodes", self._accept_for_ever(self._listener, self._pool_loop)
            )

    async def stop(self) -> None:
        """End every connection, and give back what they read from."""
        if self._pool_loop is not None:
            self._pool_loop = None
            # The pool must not be unmapped while the system is told to read from it.
            await asyncio.to_thread(self._thread.stop)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept_for_ever(
        self, listener: socket.socket, pool_loop: asyncio.AbstractEventLoop
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    # A client left before it was accepted, or this process has no descriptor left
                    # for a while.
                    log.warning("node not let in", action="link_accept_failed", error=str(error))
                    await pause(ACCEPT_AGAIN_S)
                    continue
                if len(self._connections) >= MAX_CONNECTIONS:
                    log.warning(
                        "too many nodes", action="link_connections_full", limit=MAX_CONNECTIONS
                    )
                    sock.close()
                    continue
                task = asyncio.create_task(self._serve(sock, pool_loop), name="node connection")
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            await cancel_all(self._connections)

    async def _serve(self, sock: socket.socket, pool_loop: asyncio.AbstractEventLoop) -> None:
        side, stream = Responder(self._me), None
        try:
            stream = FrameStream(sock)
            hello = await within(self._handshake_s, _greet(stream, side), "the handshake of a node")
            sender = Sender(
                peer=hello.node_id,
                beat_s=hello.beat_s,
                stream=stream,
                offers=self._offers,
                pool_loop=pool_loop,
                yielding=self._yielding,
                clock=self._clock,
                observer=self._observer,
                memory=self._memory if hello.one_sided else None,
            )
            await sender.run()
        except PilotlightError as error:
            self._observer.on_refused()
            log.warning(
                "link ended",
                action="link_refused",
                node=side.peer,
                code=error.code,
                error=error.message,
            )
            if stream is not None:
                with suppress(OSError, PilotlightError):
                    refused = Refused(code=error.code, message=error.message)
                    await within(self._handshake_s, stream.write(refused), "a refusal")
        except OSError as error:
            log.info("link broke", action="link_broke", node=side.peer, error=str(error))
        finally:
            sock.close()


async def _greet(stream: FrameStream, side: Responder) -> Hello:
    """Carry out the handshake; the other node's ``Hello``.

    Raises:
        PilotlightError: it is no node of this cluster.
    """
    hello = await stream.read_message(Hello)
    if hello is None:
        raise PeerRefused("somebody connected and left without a word")
    await stream.write(side.on_hello(hello))
    proof = await stream.read_message(Proof | Refused)
    if not isinstance(proof, Proof):
        raise PeerRefused(
            proof.message
            if isinstance(proof, Refused)
            else f"{hello.node_id} left within the handshake"
        )
    await stream.write(side.on_proof(proof))
    return hello
