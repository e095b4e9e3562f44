"""What the engine refuses, with the code of the error taxonomy that the worker reports.

::

    EngineError
    ├── BadRequest               invalid_request           the request or the call is wrong
    │   └── ContextTooLong       context_length_exceeded
    ├── UnsupportedModel         unsupported_model
    ├── BadCheckpoint            bad_checkpoint
    ├── NoRoom                   no_room                   the stage's memory is too small for this
    ├── UnknownInstance          not_loaded
    ├── Overloaded               queue_full                as much of this is done as may be; later it may be possible
    ├── StageBusy                conflict                  requests are in flight on the stage
    ├── DeadlinePassed           deadline_exceeded         the request did not end in time
    ├── PeerLost                 worker_lost               the other end of a channel is gone, or speaks nonsense
    │   ├── PeerSilent                                     it did not answer, or took nothing, in time
    │   └── PeerRefused          peer_refused              the two do not take each other for nodes of one cluster
    └── EngineFailed             engine_failed             the model computed nonsense, or a bug of ours
        ├── OutOfDeviceMemory                              a batch needs more than the device has beside its models
        └── RestoreFailed        restore_failed            a restored graph is not what was recorded

The codes are those of ``pilotlight.common.errors``; the engine raises none of those errors. A
gateway takes an unknown code for one where trying again can help.
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

    code = "invalid_request"


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

    code = "not_loaded"


class StageBusy(EngineError):
    """Requests are in flight on the stage, so it stays as it is."""

    code = "conflict"


class PeerLost(EngineError):
    """The other end of a channel is gone, or sends what makes no sense.

    What it held has to be computed elsewhere.
    """

    code = "worker_lost"


class PeerSilent(PeerLost):
    """The other end of a channel neither answered nor took anything in time."""


class PeerRefused(PeerLost):
    """The other end of a channel does not know the cluster's key, is another node than it should
    be, or takes this end for such a one.
    """

    code = "peer_refused"


class Overloaded(EngineError):
    """As many do this as may; trying again later can help."""

    code = "queue_full"


class DeadlinePassed(EngineError):
    """The request's deadline passed before its last token."""

    code = "deadline_exceeded"


class EngineFailed(EngineError):
    """The model computed no usable logits, or the engine found its own books wrong."""

    code = "engine_failed"


class OutOfDeviceMemory(EngineFailed):
    """The device has no memory for what a batch needs beside parameters and KV."""


class RestoreFailed(EngineFailed):
    """The device does not take a restored graph, or the graph does not give what was recorded: the
    process may have written anywhere.
    """

    code = "restore_failed"


class NotWanted(Exception):
    """Nobody waits any more for what is about to be done; no request is answered with it."""
