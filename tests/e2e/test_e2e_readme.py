"""The README's commands, as a new user would type them: taken from the page itself, run in this
checkout.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def block_with(word: str) -> str:
    found = [block for block in BLOCKS if word in block.splitlines()[0]]
    assert len(found) == 1, f"one block of the README should begin with {word!r}"
    return found[0]


class Reader:
    """A shell whose state folder and port are not the README's, so that no other system is
    disturbed.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        # What `make` runs must be what runs this test: its environment may lie elsewhere than in
        # .venv.
        venv = str(Path(sys.executable).parent.parent)
        # Nor is a reader's `make` the child of the one that runs the tests.
        plain = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        }
        self.environment = {
            **plain,
            "PILOTLIGHT_HOME": str(home),
            "PILOTLIGHT_PORT": str(self.port),
            "VENV": venv,
        }

    def shell(self, script: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", "-c", self.adapted(script)]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def adapted(self, script: str) -> str:
        venv = self.environment["VENV"]
        return (
            script.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
            .replace(".pilotlight/", f"{self.home}/")
            .replace(".venv/", f"{venv}/")
        )


@pytest.fixture
def reader() -> Iterator[Reader]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-readme-") as folder:
        os.chmod(folder, 0o711)
        yield Reader(Path(folder) / "home")


def test_make_demo(reader: Reader) -> None:
    done = reader.shell(block_with("make demo"))
    assert done.returncode == 0, done.stdout + done.stderr
    word, _, document = done.stdout.strip().splitlines()[-1].partition(" ")
    result = json.loads(document)
    assert word == "RESULT"
    assert result["model"] == "ember-7m"
    assert result["phase_coverage"] >= 0.95
    assert result["warm_ttft_s"] < result["cold_ttft_s"]
    assert result["output_tokens"] > 5
    assert {"fetch", "load", "prefill"} <= set(result["phases"])
    # The prompt runs through the first layers while the last are on the wire.
    assert all(
        result["while_fetching"][name] > 0.3 * result["phases"][name]
        for name in ("load", "prefill")
    ), result
    assert "A pilot light is a small flame" in done.stdout
    again = reader.shell(block_with("make demo"))
    assert again.returncode == 0, again.stdout + again.stderr


def test_make_up_and_what_follows(reader: Reader) -> None:
    command = ["bash", "-euc", "exec " + block_with("make up").strip()]
    output = reader.home.parent / "up.txt"
    with output.open("w") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=reader.environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until_it_says_what_to_try(output, process)
        asked = reader.shell(
            block_with("curl").replace("curl -N", f"curl -N -sS -D {reader.home}/headers")
        )
        assert asked.returncode == 0, asked.stderr
        assert "data: [DONE]" in asked.stdout
        answer = "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', asked.stdout))
        assert "light" in answer
        headers = dict(
            re.findall(
                r"^([\w-]+): (\S+)", (reader.home / "headers").read_text(), flags=re.MULTILINE
            )
        )
        *commands, down = [
            line for line in block_with("pilotlight model list").splitlines() if line.strip()
        ]
        assert len(commands) >= 3
        for line in commands:
            done = reader.shell(line.replace("trace ID", f"trace {headers['x-trace-id']}"))
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            assert done.stdout.strip()
        assert reader.shell(down).returncode == 0
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(DEADLINE_S)


def until_it_says_what_to_try(output: Path, process: subprocess.Popen[bytes]) -> None:
    """Read what it prints until it says so; its end is an event, its words are not."""
    for _ in range(int(DEADLINE_S / 0.1)):
        if "In another terminal" in output.read_text():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            break
    raise AssertionError(output.read_text())


def test_the_test_command_is_what_ci_runs() -> None:
    assert block_with("make test").strip() == "make test"
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_page_names_files_that_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
