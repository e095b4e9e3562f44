"""The import diet: the worker's parent process has neither torch nor transformers, and its engine's
process imports nothing but torch and what an engine needs: a cold start may wait for it.
"""

import json
import subprocess
import sys

import pytest

PARENT = """
import sys
import pilotlight.worker.app, pilotlight.worker.worker, pilotlight.worker.settings
print([name for name in ("torch", "transformers", "pilotlight.engine") if name in sys.modules])
"""
CHILD = """
import importlib, json, sys
from pilotlight.worker.engine_child import child
before = list(sys.modules)
import torch
beside = set(sys.modules)
for name in (*child.ENGINE_MODULES, "pilotlight.worker.engine_child.warmup"):
    importlib.import_module(name)
print(json.dumps([before, [name for name in sys.modules if name not in beside]]))
"""
MOST_BEFORE_TORCH, MOST_OF_THE_ENGINE = 300, 100
"""Modules; 272 and 81 when this was written, with 597 before torch until then."""
NEVER = {
    "attr",
    "httpx2",
    "llguidance",
    "nats",
    "obstore",
    "opentelemetry",
    "prometheus_client",
    "pydantic",
    "pydantic_settings",
    "pygments",
    "rich",
    "sqlalchemy",
    "tokenizers",
    "transformers",
    "triton",
}


def printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def imported() -> tuple[list[str], list[str]]:
    """What the engine's process imports before torch, and what after it."""
    before, after = json.loads(printed(CHILD))
    return before, after


def test_the_parent_imports_no_torch() -> None:
    assert printed(PARENT) == "[]"


def test_the_engines_process_imports_little(imported: tuple[list[str], list[str]]) -> None:
    before, after = imported
    assert len(before) <= MOST_BEFORE_TORCH
    assert len(after) <= MOST_OF_THE_ENGINE


def test_the_engines_process_has_nothing_of_other_services(
    imported: tuple[list[str], list[str]],
) -> None:
    before, after = imported
    assert "torch" not in before
    assert not NEVER & {name.partition(".")[0] for name in (*before, *after)}


def test_logs_for_people_can_still_be_painted() -> None:
    """What was kept from structlog is there for who asks for it."""
    program = (
        "import pilotlight.worker.engine_child, rich.console; print(bool(rich.console.Console))"
    )
    assert printed(program) == "True"
