"""What the command line loads before it says something: people and scripts ask for the version
often, and wait for it each time.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = (
    "alembic",
    "fastapi",
    "httpx2",
    "msgspec",
    "nats",
    "numpy",
    "openai",
    "opentelemetry",
    "psycopg",
    "pydantic",
    "sqlalchemy",
)
ERRORS = {
    f"pilotlight.common.errors.{module}"
    for module in ("base", "caller", "capacity", "codes", "machine", "transient")
}
COMMANDS = {
    f"pilotlight.cli.{module}"
    for module in (
        "bench_commands",
        "chat_commands",
        "completion",
        "decision_commands",
        "fleet_commands",
        "main",
        "model_commands",
        "node_commands",
        "tenant_commands",
        "options",
        "simulate_commands",
    )
}
OWN = {"pilotlight.cli", "pilotlight.common", "pilotlight.common.errors", *COMMANDS, *ERRORS}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["model", "add", "--help"]])
def test_nothing_of_the_system_is_loaded_to_say_what_it_is(arguments: list[str]) -> None:
    command = [str(Path(sys.executable).parent / "pilotlight"), *arguments]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    said = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.strip()
    loaded = {
        line.rpartition("|")[2].strip()
        for line in said.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert {name for name in loaded if name.partition(".")[0] in SLOW} == set()
    assert {name for name in loaded if name.startswith("pilotlight.")} <= OWN
    if arguments == ["--version"]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", said.stdout.strip())
