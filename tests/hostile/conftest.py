"""Fixtures of the hostile tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import RunningSystem, running


@pytest.fixture
def fresh_system() -> Iterator[RunningSystem]:
    """A system of its own: its gateway's memory has seen nothing yet. Its workers are simulated."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-hostile-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home", "--worker-kind", "sim", "--with-demo-model") as started:
            yield started
