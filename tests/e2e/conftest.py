"""Fixtures of the end-to-end tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import RunningSystem, running


@pytest.fixture(scope="session")
def system() -> Iterator[RunningSystem]:
    """One system for all tests that do not disturb it, with the demo model registered and two
    workers.
    """
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home", "--workers", "2", "--with-demo-model") as started:
            yield started
