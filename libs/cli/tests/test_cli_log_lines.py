"""A log's line for people."""

import json

import pytest

from pilotlight.cli.log_lines import told

RECORD = {
    "timestamp": "2026-11-23T00:42:10.227288Z",
    "level": "warning",
    "service": "loader",
    "event": "a fetch is slow",
    "action": "fetch_slow",
    "model": "org/[tiny]",
    "bytes_per_s": 123456.789,
    "parts": [1, 2],
}


def test_a_record_is_a_sentence_with_its_fields() -> None:
    line = told(json.dumps(RECORD), "loader").plain
    assert line == (
        "00:42:10.227 warning loader       a fetch is slow model=org/[tiny] bytes_per_s=1.235e+05 parts=[1, 2]"
    )
    assert "loader" not in told(json.dumps(RECORD)).plain


def test_an_error_has_its_remedy_and_its_stack() -> None:
    record = {**RECORD, "what_to_do": "Wait.", "exception": "Traceback:\n  File x"}
    lines = told(json.dumps(record)).plain.splitlines()
    assert lines[1:] == ["    Wait.", "    Traceback:", "      File x"]


@pytest.mark.parametrize("line", ["", "plain", "{broken", '{"other": "json"}', "[1]"])
def test_what_is_no_record_is_shown_as_it_is(line: str) -> None:
    assert told(line).plain == line
    assert told(line, "nats").plain == f"nats         {line}"
