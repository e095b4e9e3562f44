"""What the engine refuses, with the code of the error taxonomy that the worker reports.

::

    EngineError
    ├── BadRequest               bad_request               the request or the call is wrong
    │   └── ContextTooLong       context_length_exceeded
    ├── UnsupportedModel         unsupported_model
    ├── BadCheckpoint            bad_checkpoint
    ├── NoRoom                   no_room                   the stage's memory is too small for this
    ├── UnknownInstance          unknown_instance
    ├── DeadlinePassed           deadline_exceeded         the request did not end in time
    └── EngineFailed             engine_failed             the model computed nonsense, or a bug of ours

The engine does not depend on ``pilotlight.common``; the worker maps these codes to the errors there.
"""

from typing import ClassVar


class EngineError(Exception):
    """The engine cannot do that."""

    code: ClassVar[str] = "engine_failed"

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class BadRequest(EngineError):
    """The request is malformed, or the call does not fit what the engine holds."""

    code = "bad_request"


class ContextTooLong(BadRequest):
    """The prompt leaves no room for output in the model's context."""

    code = "context_length_exceeded"


class UnsupportedModel(EngineError):
    """No decoder here runs this architecture."""

    code = "unsupported_model"


class BadCheckpoint(EngineError):
    """A part's tensors are not those that the architecture needs."""

    code = "bad_checkpoint"


class NoRoom(EngineError):
    """The stage's memory can never hold this."""

    code = "no_room"


class UnknownInstance(EngineError):
    """No stage of this instance is held, or not one that can do this."""

    code = "unknown_instance"


class DeadlinePassed(EngineError):
    """The request's deadline passed before its last token."""

    code = "deadline_exceeded"


class EngineFailed(EngineError):
    """The model computed no usable logits, or the engine found its own books wrong."""

    code = "engine_failed"
