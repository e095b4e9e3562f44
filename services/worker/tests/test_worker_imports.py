"""The import diet: the worker's parent process has neither torch nor transformers, and its engine's
process imports nothing but torch and what an engine needs: a cold start may wait for it.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from pilotlight.worker.engine_child.ahead import NOT_AT_START

PARENT = """
import sys
import pilotlight.worker.app, pilotlight.worker.worker, pilotlight.worker.settings
print([name for name in ("torch", "transformers", "pilotlight.engine") if name in sys.modules])
"""
CHILD = """
import json, sys
from pilotlight.worker.engine_child import ahead, child
before = list(sys.modules)
ahead.import_torch()
beside = set(sys.modules)
ahead.import_engine(cuda=False)
after = [name for name in sys.modules if name not in beside]
from pilotlight.common.clock import SystemClock
from pilotlight.engine.engine import Engine
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker.engine_child.device import open_device
from pilotlight.worker.engine_child.warmup import warm_up
clock = SystemClock()
device = open_device(DeviceKind.CPU, 1, None, None, clock)
warm_up(Engine(1, clock.monotonic_s, device.limits, device.arena), device.probe)
used = [name for name in sys.modules if name not in beside and name not in after]
import torch
from torch._meta_registrations import device_hint
asked = [device_hint, torch.distributions.Normal, torch.export.Dim, torch.masked.MaskedTensor]
asked += [torch.quantization.quantize]
files = [sys.modules[name].__file__ is not None for name in ahead.NOT_AT_START]
print(json.dumps([before, sorted(beside), after, used, [one.__module__ for one in asked], files]))
"""
WITHIN = """
import sys
from pilotlight.worker.engine_child import ahead
ahead.NOT_AT_START = ("torch.ao", "torch.optim")
ahead.import_torch()
import torch
print(torch.optim.SGD.__module__, torch.ao.__file__ is not None, "torch.ao.nn" in sys.modules)
"""
CUDA = """
import json, sys
from types import ModuleType
from pilotlight.worker.engine_child import ahead
class Triton(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **options: given[0] if given else lambda function: function
triton = sys.modules["triton"] = Triton("triton")
triton.language = sys.modules["triton.language"] = Triton("triton.language")
ahead.import_engine(cuda=False)
before = set(sys.modules)
ahead.import_engine(cuda=True)
print(json.dumps([name for name in sys.modules if name not in before]))
"""
MOST_BEFORE_TORCH, MOST_OF_THE_ENGINE, MOST_FOR_CUDA = 301, 102, 43
"""Modules; 284 and 101 with what goes on beside the imports, and 39 for a GPU."""
MOST_OF_TORCH = 1
"""Modules that the first tokens of all import besides."""
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


@dataclass(frozen=True)
class Imported:
    """By the engine's process."""

    before: list[str]
    """torch."""
    beside: list[str]
    """When torch was there."""
    after: list[str]
    used: list[str]
    """By a first model, when all of it was imported."""
    asked: list[str]
    """Modules of what was left out, and asked for at last."""
    files: list[bool]
    """Of each that was left out, whether it is from a file by then."""


@pytest.fixture(scope="module")
def imported() -> Imported:
    return Imported(*json.loads(printed(CHILD)))


def test_the_parent_imports_no_torch() -> None:
    assert printed(PARENT) == "[]"


def test_the_engines_process_imports_little(imported: Imported) -> None:
    assert len(imported.before) <= MOST_BEFORE_TORCH
    assert len(imported.after) <= MOST_OF_THE_ENGINE


def test_an_engine_for_a_gpu_imports_little_more_than_triton() -> None:
    """Which stands in here; on a GPU ``test_gpu_imports.py`` counts all."""
    more = json.loads(printed(CUDA))
    assert {name.partition(".")[0] for name in more} <= {"pilotlight", "numpy"}
    assert len(more) <= MOST_FOR_CUDA, more


def test_a_first_model_imports_nothing_more(imported: Imported) -> None:
    assert len(imported.used) <= MOST_OF_TORCH, imported.used


def test_the_engines_process_has_nothing_of_other_services(imported: Imported) -> None:
    before, after = imported.before, imported.after
    assert "torch" not in before
    assert not NEVER & {name.partition(".")[0] for name in (*before, *after, *imported.used)}


def test_what_is_left_out_of_torch_is_there_for_who_asks_for_it(imported: Imported) -> None:
    assert not {*NOT_AT_START} & {*imported.beside, *imported.after, *imported.used}
    assert imported.asked[0] == NOT_AT_START[0]
    assert all(name.startswith("torch.") for name in imported.asked)
    assert imported.files == [True] * len(NOT_AT_START)


def test_a_module_within_one_that_is_left_out_brings_it() -> None:
    """Another torch may build on what this one does not."""
    assert printed(WITHIN) == "torch.optim.sgd True True"


def test_logs_for_people_can_still_be_painted() -> None:
    """What was kept from structlog is there for who asks for it."""
    program = (
        "import pilotlight.worker.engine_child, rich.console; print(bool(rich.console.Console))"
    )
    assert printed(program) == "True"
