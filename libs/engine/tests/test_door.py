"""A door through which others come than stages: each is found by what it comes for."""

import socket
import threading
from time import monotonic

import pytest
from channel_ends import HERE, HOST, THERE

from pilotlight.engine.channel.channel import Frame
from pilotlight.engine.channel.door import Door
from pilotlight.engine.channel.tcp import connect


@pytest.fixture
def door():
    made = Door(THERE, (HOST, 0), monotonic)
    yield made
    made.close()


def test_those_that_come_for_something_else_are_found_by_what_they_come_for(door):
    found = []

    def looks() -> None:
        deadline_s = monotonic() + 10
        while len(found) < 2 and monotonic() < deadline_s:
            found.extend(door.guests("kv/"))
            door.wait(0.01)

    looking = threading.Thread(target=looks)
    looking.start()
    ends = [
        connect((HOST, door.port), HERE, THERE.node_id, about, monotonic, 10)
        for about in ("stage", "kv/1", "kv/2")
    ]
    looking.join(10)
    assert len(found) == 2
    assert door.guests("kv/") == (), "each is given once"
    ends[2].send(Frame(b"asks", memoryview(b"")), 1)
    assert found[1].receive(10).header == b"asks", "they come one after the other"
    assert door.accept("stage", 1) is not None, "who comes for a stage waits for it"
    for one in (*ends, *found):
        one.close()


def test_a_door_that_is_waited_at_lets_go_when_something_else_is_there(door):
    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")
        began_s = monotonic()
        door.wait(60, here.fileno())
        assert monotonic() - began_s < 30
