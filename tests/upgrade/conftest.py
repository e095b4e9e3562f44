"""Earlier releases, checked out once for all tests."""

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from releases import Code, checkout, previous_commit, previous_release


@pytest.fixture
def folder() -> Generator[Path]:
    """A short path, which all users may pass: sockets lie below it, and PostgreSQL may run as
    another user.
    """
    with tempfile.TemporaryDirectory(prefix="pilotlight-up-") as made:
        os.chmod(made, 0o711)
        yield Path(made)


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """The release before this one."""
    return checkout(previous_release(), tmp_path_factory.mktemp("releases") / "previous-release")


@pytest.fixture(scope="session")
def commit(tmp_path_factory: pytest.TempPathFactory) -> Code:
    """The commit before this one."""
    return checkout(previous_commit(), tmp_path_factory.mktemp("releases") / "previous-commit")
