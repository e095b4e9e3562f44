"""A door before a NATS server: it lets connections through, or resets each a moment after the
server's greeting.

    python resetting_server.py PORT CLIENTS ROUNDS

connects clients to the server at PORT through such a door, resets them ROUNDS times in all under
uvloop, then tells them of an error and of nonsense, and ends with status 0 when after each of these
every client is connected again and hears what it has subscribed to.
"""

import contextlib
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

import uvloop

from pilotlight.common.messages.codec import Message
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import until

RESET_WITHIN_S = 0.003
AT_ONCE = struct.pack("ii", 1, 0)
GREETING = (
    b'INFO {"server_id":"door","server_name":"door","version":"2.15.1","proto":1,"headers":true,"max_payload":8388608,'
    b'"jetstream":true,"client_id":1}\r\n'
)
DEADLINE_S = 60.0


class Door:
    """Listens on a port of its own, in threads of its own."""

    def __init__(self, target_port: int) -> None:
        self.resetting = False
        self.resets = 0
        self._target_port = target_port
        self._through: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._rng = random.Random(7)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        """Reset what is connected, and from now on each new connection."""
        self.resetting = True
        for one in list(self._through):
            _reset(one)

    def open(self) -> None:
        """Let all connections through again."""
        self.resetting = False

    def say(self, words: bytes) -> None:
        """Tell every client something that the server has not said."""
        for one in list(self._clients):
            with contextlib.suppress(OSError):
                one.sendall(words)

    def close(self) -> None:
        """Take no connection any more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.resetting:
            self.resets += 1
            with contextlib.suppress(OSError):
                client.sendall(GREETING)
            time.sleep(self._rng.uniform(0, RESET_WITHIN_S))
            _reset(client)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._target_port))
        except OSError:
            _reset(client)
            return
        self._through |= {client, server}
        self._clients.add(client)
        threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
        self._pump(server, client)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                self._through.discard(one)
                self._clients.discard(one)
                _reset(one)


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        # A thread that reads from it goes on otherwise.
        one.shutdown(socket.SHUT_RD)
    one.close()


class Said(Message, frozen=True, kw_only=True):
    """Something to hear."""

    text: str


async def _survive(port: int, clients: int, rounds: int) -> None:
    door = Door(port)
    settings = BusSettings(nats_url=f"nats://127.0.0.1:{door.port}", prefix="resets.")
    speaker = await NatsBus.connect(
        BusSettings(nats_url=f"nats://127.0.0.1:{port}", prefix="resets."),
        user="test",
        name="speaker",
    )
    buses = [
        await NatsBus.connect(settings, user="test", name=f"client {number}")
        for number in range(clients)
    ]
    heard: list[set[str]] = [set() for _ in buses]
    for bus, texts in zip(buses, heard, strict=True):

        async def listen(said: Said, texts: set[str] = texts) -> None:
            texts.add(said.text)

        await bus.subscribe("said", Said, listen)
        # So that the rounds pass quickly.
        bus.client.options["reconnect_time_wait"] = 0.001
    door.shut()
    await until(lambda: door.resets >= rounds, deadline_s=DEADLINE_S)
    door.open()
    await _hear(speaker, buses, heard, "resets")
    for words in (b"-ERR 'maximum connections exceeded'\r\n", b"nonsense\r\n"):
        before = [bus.client.stats["reconnects"] for bus in buses]
        door.say(words)
        await until(
            lambda before=before: all(
                bus.client.stats["reconnects"] > one for bus, one in zip(buses, before, strict=True)
            ),
            deadline_s=DEADLINE_S,
        )
        await _hear(speaker, buses, heard, words.decode())
    for bus in (*buses, speaker):
        await bus.close()
    door.close()


async def _hear(
    speaker: NatsBus, buses: Sequence[NatsBus], heard: Sequence[set[str]], text: str
) -> None:
    await until(lambda: all(bus.connected for bus in buses), deadline_s=DEADLINE_S)
    await speaker.publish("said", Said(text=text))
    await until(lambda: all(text in texts for texts in heard), deadline_s=DEADLINE_S)


if __name__ == "__main__":
    uvloop.run(_survive(*map(int, sys.argv[1:])))
