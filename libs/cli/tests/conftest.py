"""What commands write."""

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Callable[[], Any]:
    """Reads the one JSON document that was written."""

    def read() -> Any:
        captured = capsys.readouterr()
        assert captured.err == ""
        assert captured.out.count("\n") == 1
        return json.loads(captured.out)

    return read
