"""Ways by which one node's memory is read by another in tests: NIXL where it is installed, and a
stand-in for it everywhere.
"""

import importlib.util
import shutil
from pathlib import Path

import pytest

from pilotlight.dataplane.link.nixl_agent import PACKAGES
from pilotlight.dataplane.link.nixl_process import COMMAND

HAS_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
needs_nixl = pytest.mark.skipif(
    not HAS_NIXL, reason="NIXL is not installed: pip install 'pilotlight-dataplane[nixl]'"
)
Way = dict[str, str]
"""The environment of the process that reads."""


def stand_in(what: str = "reads") -> Way:
    """``what`` as in ``stand_in_nixl``."""
    return {"PYTHONPATH": str(Path(__file__).with_name("stand_in_nixl")), "STAND_IN_NIXL": what}


def ucx(transports: str) -> Way:
    """NIXL itself, by these of UCX's transports."""
    return {"UCX_TLS": transports, "UCX_NET_DEVICES": "lo"}


WAYS = [
    pytest.param(stand_in(), id="stand-in"),
    pytest.param(ucx("tcp"), id="NIXL over TCP", marks=needs_nixl),
    pytest.param(ucx("sysv,posix,cma,self,tcp"), id="NIXL over shared memory", marks=needs_nixl),
]


def command(way: Way) -> tuple[str, ...]:
    """What starts the process that reads."""
    env = shutil.which("env")
    assert env is not None
    return env, *(f"{name}={value}" for name, value in way.items()), *COMMAND
