"""The last lines of the log, kept and not printed: of all systems that run in one process."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

_LINES = deque[Mapping[str, Any]](maxlen=2000)


def _keep(_logger: object, _method: str, line: Mapping[str, Any]) -> Any:
    _LINES.append(line)
    raise structlog.DropEvent


@contextmanager
def kept() -> Iterator[None]:
    """Keep lines within this."""
    before = structlog.get_config()
    _LINES.clear()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.TimeStamper(),
            _keep,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def recent() -> list[str]:
    """Lines of the system that asks, by its context variable ``system``."""
    ours = structlog.contextvars.get_contextvars()
    return [str(line) for line in _LINES if line.get("system") == ours.get("system")]
