"""Spans of prefills: one for each request of a sampled trace, and no more than a bound."""

from collections.abc import AsyncGenerator

import pytest

from pilotlight.common.messages.spans import SpanBatch, SpanRecord
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.telemetry import start_telemetry, stop_telemetry
from pilotlight.common.testing import until
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import RequestKey
from pilotlight.worker import tracing
from pilotlight.worker.tracing import PrefillSpans

pytestmark = pytest.mark.anyio

INSTANCE = InstanceId("inst-1")
SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Sink:
    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    async def publish(self, subject: str, message: object, *, binary: bool = False) -> None:
        assert isinstance(message, SpanBatch)
        self.spans += message.spans


@pytest.fixture
async def sink(anyio_backend: str) -> AsyncGenerator[Sink]:
    made = Sink()
    start_telemetry("test", ServiceSettings(trace_sample_ratio=0.0), made)
    yield made
    await stop_telemetry()


def key(number: int) -> RequestKey:
    return RequestKey(RequestId(f"req-{number}"), 1)


async def test_a_span_ends_with_the_first_token(sink: Sink) -> None:
    spans = PrefillSpans()
    spans.begin(key(0), INSTANCE, "")
    spans.begin(key(0), INSTANCE, SAMPLED[:-1] + "0")
    assert not spans.any
    spans.begin(key(1), INSTANCE, SAMPLED)
    spans.begin(key(1), INSTANCE, SAMPLED)
    assert spans.any
    spans.end(key(1))
    spans.end(key(1))
    assert not spans.any
    await until(lambda: sink.spans)
    (kept,) = sink.spans
    assert (kept.name, kept.attributes["request_id"]) == ("prefill", "req-1")


async def test_open_spans_are_bounded(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_OPEN", 2)
    spans = PrefillSpans()
    for number in range(3):
        spans.begin(key(number), INSTANCE, SAMPLED)
    await until(lambda: sink.spans)
    assert [one.attributes["request_id"] for one in sink.spans] == ["req-0"]
    for number in range(3):
        spans.end(key(number))
    assert not spans.any
    await until(lambda: len(sink.spans) == 3)
