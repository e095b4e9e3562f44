"""What the engine child says of errors, and of requests that it did not take."""

import socket

from pilotlight.common.envelope import Timed
from pilotlight.common.errors import EngineFailed as EngineFailedError
from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.messages.codec import frame
from pilotlight.common.messages.engine import EngineFault, Produced, Run
from pilotlight.engine.errors import EngineError
from pilotlight.engine.faults import context_lost
from pilotlight.policy.request import FinishReason

LAST_WORDS_S = 1.0


def told_of(error: Exception) -> tuple[str, str]:
    """Code and sentence for the worker."""
    match error:
        case EngineError() | PilotlightError():
            return error.code, error.message
        case _:
            return EngineFailedError.code, f"{type(error).__name__}: {error}"


def end_of(command: Run, finish: FinishReason, code: str = "", message: str = "") -> Produced:
    """The end of a request that ran nothing here.

    Args:
        command: that asked for it.
        finish: how it ended.
        code: of an error.
        message: for people.
    """
    return Produced(
        request_id=command.request_id,
        attempt=command.attempt,
        position=len(command.output_ids),
        finish=finish,
        code=code,
        message=message,
    )


def raise_if_lost(error: Exception) -> None:
    """Raise an error after which the process can do nothing more, or is not to be trusted."""
    if context_lost(error) or getattr(error, "code", "") == RestoreFailed.code:
        raise error


def last_words(connection: socket.socket, error: Exception) -> None:
    """Tell the parent why nothing more comes.

    Raises:
        OSError: the parent is gone, too.
    """
    code, message = told_of(error)
    # A parent that reads nothing must not keep it.
    connection.settimeout(LAST_WORDS_S)
    connection.sendall(frame(Timed(EngineFault(code=code, message=message))))
