"""A server of ``bench/served_gpu.py`` that answers, and the SLO that it is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import served_gpu_load as load

NO_SLO_MS = (5000.0, 200.0)
"""TTFT and TPOT that nothing here misses, of rows without an SLO."""


@dataclass
class Up:
    """A server that answers."""

    name: str
    pid: int
    """Its first process: all others descend from it."""
    target: load.Target
    cold: dict[str, Any] = field(default_factory=dict[str, Any])
    """How long the first token took when the model was loaded nowhere."""
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    declare: Callable[[float, float], None] | None = None
    """Tells it the SLO by which it will be judged, TTFT and TPOT in milliseconds; None: there is no
    way to."""


def slo(ttft_ms: float, tpot_ms: float) -> dict[str, float]:
    """As the admin API takes it."""
    return {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
