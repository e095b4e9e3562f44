"""The process that reads other nodes' memory for its loader, and lets them read the loader's host
pool.

It is one of its own because a one-sided read cannot be taken back: NIXL has no way to cancel one,
and a reader that lets go of one that is under way may have its memory written to afterwards. Bytes
land in memory that is this process's alone, and a slot of it is used again only after a read into
it is done; where too many never are, the loader ends the process, and with it whatever could still
write. Nothing that breaks in a library of drivers breaks the loader.

Started as ``python -m pilotlight.dataplane.link.nixl_reader DESCRIPTOR``; it ends when the socket
does.
"""

import mmap
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.messages.codec import encode_msgpack
from pilotlight.dataplane.link.nixl_agent import Agent, NixlAgent, NotInstalled, ReadFailed
from pilotlight.dataplane.link.nixl_wire import (
    MAX_MESSAGE_BYTES,
    Begin,
    Done,
    Forget,
    FromLoader,
    Learn,
    Learned,
    Read,
    Ready,
    Stir,
    Unusable,
    decode,
)

HOT_S = 0.01
"""For so long after something happened the process looks again at once."""
AWAKE_S = 10.0
"""How long after a ``Stir`` another node may be reading here: it is said more often than that."""
BUSY_NAP_MS = 1
"""Then it rests for so long between two looks, while a read is under way, here or there,"""
IDLE_NAP_MS = 50
"""and for so long while none is."""


@dataclass(slots=True, kw_only=True)
class Reader:
    """The process's one loop."""

    sock: socket.socket
    agent: Agent
    landing: int
    """The landing memory's address."""
    clock: Clock = field(default_factory=SystemClock)
    _peers: dict[int, str] = field(default_factory=dict[int, str])
    _reads: dict[int, tuple[int, Any]] = field(default_factory=dict[int, tuple[int, Any]])
    """Those under way: the node that is read, and the agent's handle."""
    _broken: list[Any] = field(default_factory=list[Any])
    """Handles of those that ended with an error: NIXL would let go of memory that it may still
    write to."""
    _forgotten: set[int] = field(default_factory=set[int])
    _hot_until_s: float = 0.0
    _awake_until_s: float = 0.0

    def run(self) -> None:
        """Serve until the loader is gone."""
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)
        while True:
            if waiting.poll(self._nap_ms()):
                data = self.sock.recv(MAX_MESSAGE_BYTES)
                if not data:
                    return
                self._on_message(decode(data, FromLoader))
                self._hot_until_s = self.clock.monotonic_s() + HOT_S
            self.agent.progress()
            self._look()

    def _nap_ms(self) -> int:
        now_s = self.clock.monotonic_s()
        if now_s < self._hot_until_s:
            os.sched_yield()
            return 0
        return BUSY_NAP_MS if self._reads or now_s < self._awake_until_s else IDLE_NAP_MS

    def _on_message(self, message: object) -> None:
        match message:
            case Read():
                self._begin(message)
            case Learn():
                self._learn(message)
            case Forget():
                self._forgotten.add(message.peer)
                self._forget()
            case Stir():
                self._awake_until_s = self.clock.monotonic_s() + AWAKE_S
            case _:
                pass

    def _learn(self, message: Learn) -> None:
        try:
            self._peers[message.peer] = self.agent.learn(message.agent)
        except Exception as error:  # noqa: BLE001 - whatever it is, that node is not read from
            self._say(Learned(peer=message.peer, error=f"{type(error).__name__}: {error}"))
        else:
            self._say(Learned(peer=message.peer))

    def _begin(self, message: Read) -> None:
        name = self._peers.get(message.peer)
        try:
            if name is None:
                raise ReadFailed("nobody knows that node")
            read = self.agent.read(
                name, message.address, self.landing + message.offset, message.size_bytes
            )
        except ReadFailed as error:
            self._say(Done(number=message.number, error=str(error)))
        else:
            self._reads[message.number] = message.peer, read

    def _look(self) -> None:
        for number, (_, read) in tuple(self._reads.items()):
            try:
                if not self.agent.is_done(read):
                    continue
                done = Done(number=number)
            except ReadFailed as error:
                self._broken.append(read)
                done = Done(number=number, error=str(error))
            del self._reads[number]
            self._say(done)
            self._hot_until_s = self.clock.monotonic_s() + HOT_S
            self._forget()

    def _forget(self) -> None:
        reading = {peer for peer, _ in self._reads.values()}
        for peer in self._forgotten - reading:
            self._forgotten.discard(peer)
            name = self._peers.pop(peer, None)
            if name is not None and name not in self._peers.values():
                self.agent.forget(name)

    def _say(self, message: object) -> None:
        self.sock.sendall(encode_msgpack(message))


def serve(sock: socket.socket, make_agent: Callable[[str], Agent]) -> int:
    """Be the reader of the loader at the other end; the process's exit status."""
    begin = decode(sock.recv(MAX_MESSAGE_BYTES), Begin)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if begin.is_writable else 0)
    pool = mmap.mmap(begin.pool_descriptor, begin.pool_bytes, prot=access)
    landing = mmap.mmap(begin.landing_descriptor, begin.landing_bytes)
    try:
        agent = make_agent(begin.name)
        pool_address = agent.register(memoryview(pool)[begin.pool_start :])
        # What is registered later is no part of what others hear.
        offer = agent.offer()
        ours = agent.register(memoryview(landing))
        sock.sendall(encode_msgpack(Ready(agent=offer, address=pool_address)))
    except Exception as error:  # noqa: BLE001 - whatever it is, there is no NIXL here
        reason = (
            str(error) if isinstance(error, NotInstalled) else f"{type(error).__name__}: {error}"
        )
        sock.sendall(
            encode_msgpack(Unusable(reason=reason, is_final=isinstance(error, NotInstalled)))
        )
        return 1
    Reader(sock=sock, agent=agent, landing=ours).run()
    return 0


def main(descriptor: int, make_agent: Callable[[str], Agent] = NixlAgent) -> None:
    """Serve, and end without tidying up: what a library does with reads under way does not matter
    any more.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 1
    try:
        status = serve(socket.socket(fileno=descriptor), make_agent)
    except OSError:
        # The loader has ended.
        pass
    except Exception:  # noqa: BLE001 - it is told, and ends the process
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
