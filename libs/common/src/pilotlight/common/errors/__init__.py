"""Every error that leaves a function of ours, with its code, its status and what the user can do.

::

    PilotlightError
    ├── CallerError          the request is wrong; sending it again changes nothing
    │   ├── BadRequest ── ContextTooLong, MessageUndecodable
    │   ├── Unauthorized, Forbidden, NotFound ── ModelNotFound, NodeNotFound, TraceNotFound, RouteNotFound
    │   ├── MethodNotAllowed, AlreadyExists, Conflict ── ModelCold
    │   ├── UnprocessableInput ── BadCheckpoint, UnsupportedModel, UriNotAllowed, TextFailed
    │   ├── TooLarge ── MessageTooLarge, HeadTooLarge
    │   └── BodyTimeout, UnsupportedEncoding, QuotaUsedUp
    ├── CapacityError        nothing is wrong; there is no room now (429, Retry-After)
    │   ├── TooManyHeld, QueueFull, BodiesFull
    │   ├── RateLimited ── TokensLimited
    │   └── NoRoom ── HostPoolFull, NoWorker
    ├── TransientError       something failed; trying again can help (503)
    │   ├── DeadlineExceeded, ControlPlaneUnavailable
    │   ├── BusUnavailable ── BusDenied, BusFull
    │   ├── DatabaseUnavailable ── DatabaseDenied, DatabaseCrowded, DatabaseFull
    │   ├── SourceUnavailable ── SourceMissing, SourceDenied, StoreFull, PeerUnavailable ── PeerRefused
    │   ├── SourceChanged, CorruptChunk
    │   ├── NotLoaded, StaleCommand, NotLeader, TextUnavailable
    │   └── WorkerLost, EngineFailed ── DeviceFailed, RestoreFailed
    ├── SettingsInvalid      the operator's to mend: the process does not start
    ├── MachineUnfit         the machine's to mend, or its operator's: the process does not start
    │   └── FileLimitTooLow, DiskFull, SharedMemoryTooSmall, HostPoolTaken, DiskTierTaken, PortTaken, FolderUnusable
    └── InternalError        a bug: the process says so and, where state may be wrong, ends

``code`` is stable: clients, alerts and runbooks use it. The class docstring's first line is the
default message.

Errors are imported from here, whichever module of this package defines them.
"""

from pilotlight.common.errors.base import (
    CallerError,
    CapacityError,
    InternalError,
    PilotlightError,
    TransientError,
)
from pilotlight.common.errors.caller import (
    AlreadyExists,
    BadCheckpoint,
    BadRequest,
    BodyTimeout,
    Conflict,
    ContextTooLong,
    Forbidden,
    HeadTooLarge,
    MessageTooLarge,
    MessageUndecodable,
    MethodNotAllowed,
    ModelCold,
    ModelNotFound,
    NodeNotFound,
    NotFound,
    QuotaUsedUp,
    RouteNotFound,
    TextFailed,
    TooLarge,
    TraceNotFound,
    Unauthorized,
    UnprocessableInput,
    UnsupportedEncoding,
    UnsupportedModel,
    UriNotAllowed,
)
from pilotlight.common.errors.capacity import (
    BodiesFull,
    HostPoolFull,
    NoRoom,
    NoWorker,
    QueueFull,
    RateLimited,
    TokensLimited,
    TooManyHeld,
)
from pilotlight.common.errors.codes import all_errors, error_of
from pilotlight.common.errors.machine import (
    DiskFull,
    DiskTierTaken,
    FileLimitTooLow,
    FolderUnusable,
    HostPoolTaken,
    MachineUnfit,
    PortTaken,
    SettingsInvalid,
    SharedMemoryTooSmall,
)
from pilotlight.common.errors.transient import (
    BusDenied,
    BusFull,
    BusUnavailable,
    ControlPlaneUnavailable,
    CorruptChunk,
    DatabaseCrowded,
    DatabaseDenied,
    DatabaseFull,
    DatabaseUnavailable,
    DeadlineExceeded,
    DeviceFailed,
    EngineFailed,
    NotLeader,
    NotLoaded,
    PeerRefused,
    PeerUnavailable,
    RestoreFailed,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
    StaleCommand,
    StoreFull,
    TextUnavailable,
    WorkerLost,
)

__all__ = [
    "AlreadyExists",
    "BadCheckpoint",
    "BadRequest",
    "BodiesFull",
    "BodyTimeout",
    "BusDenied",
    "BusFull",
    "BusUnavailable",
    "CallerError",
    "CapacityError",
    "Conflict",
    "ContextTooLong",
    "ControlPlaneUnavailable",
    "CorruptChunk",
    "DatabaseCrowded",
    "DatabaseDenied",
    "DatabaseFull",
    "DatabaseUnavailable",
    "DeadlineExceeded",
    "DeviceFailed",
    "DiskFull",
    "DiskTierTaken",
    "EngineFailed",
    "FileLimitTooLow",
    "FolderUnusable",
    "Forbidden",
    "HeadTooLarge",
    "HostPoolFull",
    "HostPoolTaken",
    "InternalError",
    "MachineUnfit",
    "MessageTooLarge",
    "MessageUndecodable",
    "MethodNotAllowed",
    "ModelCold",
    "ModelNotFound",
    "NoRoom",
    "NoWorker",
    "NodeNotFound",
    "NotFound",
    "NotLeader",
    "NotLoaded",
    "PeerRefused",
    "PeerUnavailable",
    "PilotlightError",
    "PortTaken",
    "RestoreFailed",
    "QueueFull",
    "QuotaUsedUp",
    "RateLimited",
    "RouteNotFound",
    "SettingsInvalid",
    "SharedMemoryTooSmall",
    "SourceChanged",
    "SourceDenied",
    "SourceMissing",
    "SourceUnavailable",
    "StaleCommand",
    "StoreFull",
    "TextFailed",
    "TextUnavailable",
    "TokensLimited",
    "TooLarge",
    "TooManyHeld",
    "TraceNotFound",
    "TransientError",
    "Unauthorized",
    "UnprocessableInput",
    "UnsupportedEncoding",
    "UnsupportedModel",
    "UriNotAllowed",
    "WorkerLost",
    "all_errors",
    "error_of",
]
