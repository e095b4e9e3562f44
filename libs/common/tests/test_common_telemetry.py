import asyncio
import io
import json
import threading
from collections.abc import AsyncGenerator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from pilotlight.common import span_senders
from pilotlight.common.errors import NoRoom
from pilotlight.common.messages.spans import SPANS_SUBJECT, SpanBatch, SpanRecord
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.telemetry import (
    begin_span,
    client_span,
    configure_logging,
    current_traceparent,
    inject,
    log_request,
    server_span,
    span,
    start_telemetry,
    stop_telemetry,
    with_parent,
)
from pilotlight.common.testing import until

pytestmark = pytest.mark.anyio

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"


class Sink:
    """A bus that keeps the spans that are sent over it."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self.failing = False

    async def publish(self, subject: str, message: object, *, binary: bool = False) -> None:
        assert subject == SPANS_SUBJECT
        assert isinstance(message, SpanBatch)
        if self.failing:
            raise ConnectionError
        self.spans += message.spans


@pytest.fixture
async def sink(anyio_backend: str) -> AsyncGenerator[Sink]:
    yield Sink()
    await stop_telemetry()
    structlog.reset_defaults()


async def test_context_passes_through_a_process_without_spans() -> None:
    assert current_traceparent() == ""
    assert inject({}) == {}
    with with_parent(SAMPLED), span("nothing is recorded"), client_span("nor here"):
        assert inject({"a": "b"}) == {"a": "b", "traceparent": SAMPLED}
    with server_span("x", {"traceparent": SAMPLED}):
        assert current_traceparent() == SAMPLED
    assert current_traceparent() == ""


@pytest.mark.parametrize("wrong", ["", "nonsense", "00-0-0-00", f"00-{'0' * 32}-{'0' * 16}-01"])
async def test_a_malformed_context_changes_nothing(sink: Sink, wrong: str) -> None:
    start_telemetry("test", ServiceSettings(), sink)
    with with_parent(wrong):
        assert current_traceparent() == ""
    with server_span("x", {"traceparent": wrong}):
        assert TRACE_ID not in current_traceparent()


async def test_spans_form_one_trace(sink: Sink) -> None:
    start_telemetry("test", ServiceSettings(), sink)
    with server_span("serve", {"traceparent": SAMPLED}), span("inner", model="m", tokens=3):
        assert current_traceparent().split("-")[1] == TRACE_ID
        with server_span("heard", {"traceparent": current_traceparent()}, record=False):
            assert current_traceparent().split("-")[1] == TRACE_ID
    await stop_telemetry()
    inner, serve = sink.spans
    assert (inner.name, inner.service, inner.attributes) == (
        "inner",
        "test",
        {"model": "m", "tokens": 3},
    )
    assert (inner.trace_id, inner.parent_id, serve.parent_id) == (TRACE_ID, serve.span_id, SPAN_ID)
    assert serve.start_at_s <= inner.start_at_s <= inner.end_at_s <= serve.end_at_s


async def test_a_span_that_ends_elsewhere_belongs_to_a_sampled_trace(sink: Sink) -> None:
    assert begin_span("work", SAMPLED) is None, "nothing is traced yet"
    start_telemetry("test", ServiceSettings(trace_sample_ratio=0.0), sink)
    assert begin_span("work", "") is None
    assert begin_span("work", NOT_SAMPLED) is None
    begun = begin_span("work", SAMPLED, instance_id="inst-1")
    assert begun is not None
    assert current_traceparent() == "", "it is current nowhere"
    begun.end()
    await until(lambda: sink.spans)
    (kept,) = sink.spans
    assert (kept.name, kept.trace_id, kept.parent_id) == ("work", TRACE_ID, SPAN_ID)
    assert kept.attributes == {"instance_id": "inst-1"}


async def test_a_failure_is_kept_although_its_trace_is_not_sampled(sink: Sink) -> None:
    start_telemetry("test", ServiceSettings(trace_sample_ratio=0.0), sink)
    with span("well"):
        pass

    def fail() -> None:
        with span("badly", tokens=3) as current:
            assert current_traceparent().split("-")[1::2] == [TRACE_ID, "00"]
            current.set_attribute("model", "m")
            raise NoRoom("the message may quote a prompt")

    with with_parent(NOT_SAMPLED), pytest.raises(NoRoom):
        fail()
    with span("cold"):
        parent = current_traceparent(keep=True)
    with with_parent(parent), span("joined"):
        pass
    await stop_telemetry()
    assert [(record.name, record.status) for record in sink.spans] == [
        ("badly", "no_room"),
        ("joined", "ok"),
    ]
    badly = sink.spans[0]
    assert (badly.trace_id, badly.parent_id, badly.service) == (TRACE_ID, SPAN_ID, "test")
    assert badly.attributes == {"tokens": 3, "model": "m"}
    assert badly.start_at_s <= badly.end_at_s
    assert "quote" not in str(sink.spans)


async def test_failures_within_a_trace_that_is_not_sampled_belong_together(sink: Sink) -> None:
    start_telemetry("test", ServiceSettings(trace_sample_ratio=0.0), sink)

    def fail() -> None:
        with span("outer"):
            outer = current_traceparent()
            with span("inner"):
                assert current_traceparent() == outer, "its context is that of the first"
                raise NoRoom("x")

    with pytest.raises(NoRoom):
        fail()
    await stop_telemetry()
    inner, outer = sink.spans
    assert [inner.name, outer.name] == ["inner", "outer"]
    assert (inner.trace_id, inner.parent_id) == (outer.trace_id, outer.span_id)
    assert inner.span_id != outer.span_id
    assert not outer.parent_id


async def test_spans_that_do_not_fit_are_counted(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_senders, "MAX_QUEUED_SPANS", 3)
    metrics = CollectorRegistry()
    start_telemetry("test", ServiceSettings(), sink, metrics=metrics)
    for _ in range(5):
        with span("x"):
            pass
    await stop_telemetry()
    assert len(sink.spans) == 3
    assert metrics.get_sample_value("pilotlight_spans_dropped_total", {"destination": "bus"}) == 2


async def test_a_failing_destination_ends_nothing(sink: Sink) -> None:
    metrics = CollectorRegistry()
    sink.failing = True
    start_telemetry("test", ServiceSettings(), sink, metrics=metrics)
    with span("lost"):
        pass
    await until(
        lambda: (
            metrics.get_sample_value("pilotlight_spans_dropped_total", {"destination": "bus"}) == 1
        )
    )
    sink.failing = False
    with span("kept"):
        pass
    await stop_telemetry()
    assert [record.name for record in sink.spans] == ["kept"]


async def test_spans_go_to_a_collector_too(sink: Sink) -> None:
    taken: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        start_telemetry(
            "test", ServiceSettings(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/"), sink
        )
        with span("far and near"):
            pass
        await stop_telemetry()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, body),) = taken
    assert path == "/v1/traces"
    assert b"far and near" in body
    assert b"pilotlight-test" in body
    assert [record.name for record in sink.spans] == ["far and near"]


async def test_a_requests_line_is_what_the_logger_would_write(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    configure_logging("test")
    with with_parent(SAMPLED):
        log_request("request done", "request_done", model="m", elapsed_s=0.5)
        structlog.get_logger().info("request done", action="request_done", model="m", elapsed_s=0.5)
    straight, logged = (json.loads(line) for line in output.getvalue().splitlines())
    at, logged_at = straight.pop("timestamp"), logged.pop("timestamp")
    assert (at[:10], at[-1]) == (logged_at[:10], logged_at[-1])
    assert (
        0 <= (datetime.fromisoformat(logged_at) - datetime.fromisoformat(at)).total_seconds() < 60
    )
    assert straight == logged
    configure_logging("test", "warning")
    log_request("request done", "request_done")
    assert len(output.getvalue().splitlines()) == 2


async def test_log_lines_are_json_with_their_trace(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stderr", output)
    configure_logging("test")
    log = structlog.get_logger()
    with with_parent(SAMPLED):
        log.info("something happened", action="it_happened", model="m", path=sink)
    log.debug("not at this level", action="debug")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed", action="failed")
    first, second = (json.loads(line) for line in output.getvalue().splitlines())
    assert (first["event"], first["action"], first["service"], first["trace_id"]) == (
        "something happened",
        "it_happened",
        "test",
        TRACE_ID,
    )
    assert "ValueError: why" in second["exception"]


async def test_a_context_from_elsewhere_hides_a_span_that_is_not_sampled(sink: Sink) -> None:
    start_telemetry("test", ServiceSettings(trace_sample_ratio=0.0), sink)
    with server_span("serve", None):
        outer = current_traceparent()
        with with_parent(SAMPLED):
            assert current_traceparent() == SAMPLED
            with span("within"):
                assert current_traceparent().split("-")[1] == TRACE_ID
        assert current_traceparent() == outer
        assert await asyncio.create_task(_told()) == outer, "tasks have it too"
    assert current_traceparent() == ""
    await stop_telemetry()
    assert [each.name for each in sink.spans] == ["within"]


async def _told() -> str:
    return current_traceparent()
