"""Clients that come at once are taken in a few turns of the loop, not one in each."""

import asyncio
import socket
from collections import Counter
from types import SimpleNamespace

import uvloop

from pilotlight.common.service import Background
from pilotlight.gateway.edge.connection import Connection
from pilotlight.gateway.edge.server import ACCEPTING, HttpServer

CLIENTS = 4 * ACCEPTING


def test_a_turn_of_the_loop_accepts_many(monkeypatch):
    by_turn = Counter()

    async def all_taken():
        loop, taken = asyncio.get_running_loop(), asyncio.Event()
        turn = [0]

        def next_turn():
            turn[0] += 1

        def connection_made(self, transport):
            if not by_turn[turn[0]]:
                # It runs when this turn has taken all that it takes.
                loop.call_soon(next_turn)
            by_turn[turn[0]] += 1
            transport.close()
            if by_turn.total() == CLIENTS:
                taken.set()

        monkeypatch.setattr(Connection, "connection_made", connection_made)
        monkeypatch.setattr(Connection, "connection_lost", lambda *_: None)
        app = SimpleNamespace(refused=None)
        server = HttpServer(
            app, lambda _: None, Background(), host="127.0.0.1", port=0, drain_s=1.0
        )
        await server.start()
        # The kernel accepts them; the loop does not run meanwhile.
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(CLIENTS)]
        await taken.wait()
        await server.stop()
        for client in clients:
            client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_taken())
    assert max(by_turn.values()) >= ACCEPTING
