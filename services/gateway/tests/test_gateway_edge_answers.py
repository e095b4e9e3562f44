"""Answers that are sent past ASGI's messages are those that uvicorn makes of such messages."""

import asyncio
import logging
from types import SimpleNamespace

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pilotlight.gateway.edge.connection_answer import ConnectionAnswer

LOG = logging.getLogger("test")
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"req-1")]


class Wire:
    """A transport that keeps what is written; as much of a response as a client reads of it."""

    def __init__(self):
        self.data, self.closed, self.completed = b"", False, 0

    def write(self, data):
        self.data += data

    def close(self):
        self.closed = True

    def complete(self):
        self.completed += 1

    def read(self):
        found = SimpleNamespace(headers=[], body=b"", complete=False)
        found.on_header = lambda name, value: found.headers.append((name.lower(), value))
        found.on_body = lambda data: setattr(found, "body", found.body + data)
        found.on_message_complete = lambda: setattr(found, "complete", True)
        parser = httptools.HttpResponseParser(found)
        parser.feed_data(self.data)
        return parser.get_status_code(), sorted(found.headers), found.body, found.complete


def answering(*, keep_alive=True, more_body=False, version="1.1", method="POST"):
    """An answer on a wire of its own, and that wire."""
    wire = Wire()
    cycle = RequestResponseCycle(
        scope={"type": "http", "http_version": version, "method": method},
        transport=wire,
        flow=FlowControl(wire),
        logger=LOG,
        access_logger=LOG,
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=wire.complete,
    )
    cycle.more_body = more_body
    connection = SimpleNamespace(tasks=set(), linger=lambda: None)
    return ConnectionAnswer(connection, cycle), cycle, wire


def by_asgi(answer, headers, parts, *, more):
    """The same answer by ASGI's messages."""

    async def send():
        await answer.send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await answer.send({"type": "http.response.body", "body": part, "more_body": more})
        if more:
            await answer.send({"type": "http.response.body", "body": b"", "more_body": False})

    asyncio.run(send())


@given(st.lists(st.binary(min_size=1), min_size=1), st.binary(), st.booleans())
def test_a_stream_is_as_by_asgi(parts, last, keep_alive):
    ours, cycle, wire = answering(keep_alive=keep_alive)
    assert ours.begin(200, HEADERS, parts[0], more=True)
    for part in parts[1:]:
        assert ours.go_on(part, more=True)
    assert not cycle.response_complete
    assert ours.go_on(last, more=False)
    theirs, other, expected = answering(keep_alive=keep_alive)
    by_asgi(theirs, HEADERS, [*parts, last], more=True)
    assert wire.read() == expected.read()
    assert (wire.closed, wire.completed) == (expected.closed, 1) == (not keep_alive, 1)
    assert cycle.response_complete
    assert other.response_complete
    assert not ours.go_on(b"more", more=True), "it has ended"


@given(st.binary(), st.booleans())
def test_a_whole_answer_is_as_by_asgi(body, keep_alive):
    headers = [*HEADERS, (b"content-length", str(len(body)).encode())]
    ours, _, wire = answering(keep_alive=keep_alive)
    assert ours.begin(200, headers, body, more=False)
    theirs, _, expected = answering(keep_alive=keep_alive)
    by_asgi(theirs, headers, [body], more=False)
    assert wire.read() == expected.read()
    assert (wire.closed, wire.completed) == (expected.closed, expected.completed)


@pytest.mark.parametrize(
    ("given_answer", "headers"),
    [
        ({"more_body": True}, HEADERS),
        ({"version": "1.0"}, HEADERS),
        ({"method": "HEAD"}, HEADERS),
        ({}, [(b"x-a", b"1\r\nx-b: 2")]),
        ({}, [(b"x-a", b"\x00")]),
    ],
)
def test_what_asgi_has_rules_for_goes_its_way(given_answer, headers):
    answer, cycle, wire = answering(**given_answer)
    assert not answer.begin(200, headers, b"x", more=True)
    assert not cycle.response_started
    assert not wire.data


def test_a_client_that_does_not_read_is_waited_for():
    answer, cycle, wire = answering()
    assert answer.begin(200, HEADERS, b"x", more=True)
    sent = wire.data
    cycle.flow.pause_writing()
    assert not answer.go_on(b"y", more=True)
    assert wire.data == sent
    cycle.flow.resume_writing()
    assert answer.go_on(b"y", more=True)


def test_a_body_is_taken_once_all_of_it_is_there():
    answer, cycle, _ = answering(more_body=True)
    cycle.body += b"ab"
    assert answer.whole_body() is None
    cycle.body += b"c"
    cycle.more_body = False
    cycle.message_event.set()
    assert answer.whole_body() == b"abc"
    assert not cycle.message_event.is_set()
    cycle.disconnected = True
    assert answer.whole_body() is None


def test_only_its_own_send_is_nothing_between():
    answer, other = answering()[0], answering()[0]
    assert answer.sends(answer.send)
    assert not answer.sends(other.send)
