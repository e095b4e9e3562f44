"""Every message of this release decodes with the code of the one before, and the reverse: while
both run, both are spoken.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from message_samples import read, write
from releases import ROOT, THIS, Code

pytestmark = pytest.mark.slow

SAMPLES = ROOT / "tests" / "support" / "message_samples.py"
DEADLINE_S = 60.0


def run(code: Code, what: str, folder: Path) -> str:
    command = [sys.executable, str(SAMPLES), what, str(folder)]
    environment = {**os.environ, **code.environment}
    return subprocess.run(
        command,
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout


@pytest.mark.parametrize("which", ["release", "commit"])
def test_the_release_before_understands_this_one(
    request: pytest.FixtureRequest, which: str, tmp_path: Path
) -> None:
    write(tmp_path)
    decoded, failed = json.loads(run(request.getfixturevalue(which), "read", tmp_path))
    assert not failed
    assert len(decoded) > 30


@pytest.mark.parametrize("which", ["release", "commit"])
def test_this_release_understands_the_one_before(
    request: pytest.FixtureRequest, which: str, tmp_path: Path
) -> None:
    run(request.getfixturevalue(which), "write", tmp_path)
    decoded, failed = read(tmp_path)
    assert not failed
    assert len(decoded) > 30
    assert len(decoded) == len(list(tmp_path.iterdir())), "a message of the release before is gone"


def test_the_program_runs_the_code_that_it_is_told_to(tmp_path: Path) -> None:
    run(THIS, "write", tmp_path)
    assert json.loads(run(THIS, "read", tmp_path))[1] == []
