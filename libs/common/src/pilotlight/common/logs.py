"""Logs: JSON lines on standard error.

Apart from ``telemetry``, whose libraries take longer to import than all else that an engine's
process needs before torch.
"""

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog

from pilotlight.common.clock import SystemClock

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_clock = SystemClock()
_encoder = msgspec.json.Encoder(enc_hook=repr)


def write_logs(
    service: str, level: str = "info", add: structlog.typing.Processor | None = None
) -> None:
    """Write every log line of this process, also those of libraries, as JSON on standard error.

    ``add`` adds to each line.
    """

    def add_service(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *(() if add is None else (add,)),
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer(serializer=to_json)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS.get(level, logging.INFO)),
        # Looked up for each line: a test or a daemon that redirects standard error means the log
        # too.
        logger_factory=lambda *_: LogLines(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=shared)
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class LogLines(structlog.WriteLogger):
    """Writes lines as long as they can be written: where logs go to a disk that is full, the
    service goes on without.
    """

    def msg(self, message: str) -> None:
        """Writes one."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def stamp() -> str:
    """The time of a line, as structlog writes it."""
    return _clock.wall().isoformat()[: -len("+00:00")] + "Z"


def to_json(value: Any, **_: Any) -> str:
    """A log line."""
    return _encoder.encode(value).decode()
