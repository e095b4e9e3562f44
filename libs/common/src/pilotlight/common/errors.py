"""Every error that leaves a function of ours, with its code, its status and what the user can do.

::

    PilotlightError
    ├── CallerError          the request is wrong; sending it again changes nothing
    │   ├── BadRequest ── ContextTooLong, MessageUndecodable
    │   ├── Unauthorized, Forbidden, NotFound ── ModelNotFound, NodeNotFound, TraceNotFound, RouteNotFound
    │   ├── MethodNotAllowed, AlreadyExists, Conflict
    │   ├── UnprocessableInput ── BadCheckpoint, UnsupportedModel, UriNotAllowed, TextFailed
    │   ├── TooLarge ── MessageTooLarge
    │   └── BodyTimeout, UnsupportedEncoding
    ├── CapacityError        nothing is wrong; there is no room now (429, Retry-After)
    │   ├── TooManyHeld, QueueFull, BodiesFull
    │   └── NoRoom ── HostPoolFull, NoWorker
    ├── TransientError       something failed; trying again can help (503)
    │   ├── DeadlineExceeded, ControlPlaneUnavailable
    │   ├── BusUnavailable ── BusDenied, BusFull
    │   ├── DatabaseUnavailable ── DatabaseDenied, DatabaseCrowded, DatabaseFull
    │   ├── SourceUnavailable ── SourceMissing, SourceDenied, StoreFull, PeerUnavailable ── PeerRefused
    │   ├── SourceChanged, CorruptChunk
    │   ├── NotLoaded, StaleCommand, NotLeader, TextUnavailable
    │   └── WorkerLost, EngineFailed ── DeviceFailed
    ├── SettingsInvalid      the operator's to mend: the process does not start
    ├── MachineUnfit         the machine's to mend, or its operator's: the process does not start
    │   └── FileLimitTooLow, DiskFull, SharedMemoryTooSmall, HostPoolTaken, DiskTierTaken, PortTaken, FolderUnusable
    └── InternalError        a bug: the process says so and, where state may be wrong, ends

``code`` is stable: clients, alerts and runbooks use it. The class docstring's first line is the default message.
"""

from typing import ClassVar


class PilotlightError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    action: ClassVar[str] = "Look at the logs with `pilotlight logs`."
    """What the user can do."""
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None) -> None:
        doc = (type(self).__doc__ or "").strip().splitlines()
        self.message = message or (doc[0] if doc else self.code)
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class CallerError(PilotlightError):
    """The request cannot be carried out as it is."""

    code = "invalid_request"
    status = 400
    action = "Correct the request, and send it again."
    openai_type = "invalid_request_error"


class BadRequest(CallerError):
    """The request is malformed."""


class ContextTooLong(BadRequest):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"
    action = "Shorten the prompt, or ask for fewer tokens."

    @classmethod
    def by_prompt(cls, limit_tokens: int, prompt_tokens: int, *, chat: bool, more: bool = False) -> "ContextTooLong":
        """The prompt alone leaves no room for an answer. In OpenAI's words: there are clients that look for them.

        Args:
            limit_tokens: the model's context.
            prompt_tokens: what the prompt has; with ``more`` it has at least so many.
            chat: it is a conversation's.
            more: the prompt was not counted to its end.
        """
        param = "messages" if chat else "prompt"
        resulted = f"{'at least ' if more else ''}{prompt_tokens} tokens"
        return cls(
            f"This model's maximum context length is {limit_tokens} tokens. However, your {param} resulted in {resulted}, which leaves "
            "no room for an answer",
            param=param,
        )


class MessageUndecodable(BadRequest):
    """A message cannot be decoded."""

    code = "message_undecodable"
    action = "Check that both ends run releases that speak the same major version."


class Unauthorized(CallerError):
    """A valid API key is needed."""

    code = "invalid_api_key"
    status = 401
    action = "Send `Authorization: Bearer KEY`; embedded mode writes keys to api.key and admin.key."


class Forbidden(CallerError):
    """This key may not do that."""

    code = "forbidden"
    status = 403
    action = "Use an admin key for /admin/v1, an inference key for /v1."


class NotFound(CallerError):
    """There is no such thing."""

    code = "not_found"
    status = 404
    action = "Check the name: the message says what was looked for."


class ModelNotFound(NotFound):
    """There is no such model."""

    code = "model_not_found"
    action = "See `pilotlight model list`, or register it with `pilotlight model add`."


class NodeNotFound(NotFound):
    """There is no such node."""

    code = "node_not_found"
    action = "See `pilotlight node list`; a node is known while its loader reports, or while it is to be drained."


class TraceNotFound(NotFound):
    """Nothing is kept of this trace."""

    code = "trace_not_found"
    action = "Check the id: it is the x-trace-id header of an answer, or trace_id in a log. Spans are kept for PILOTLIGHT_SPANS_KEEP_DAYS."


class RouteNotFound(NotFound):
    """There is no such route."""

    code = "route_not_found"
    action = "The API is described at /v1/openapi.json and /admin/v1/docs."


class MethodNotAllowed(CallerError):
    """The route does not take this method."""

    code = "method_not_allowed"
    status = 405
    action = "Use a method that the Allow header names."


class AlreadyExists(CallerError):
    """The name is taken."""

    code = "already_exists"
    status = 409
    action = "Choose another name, or delete the old one first."


class Conflict(CallerError):
    """The thing changed, or its state does not allow this."""

    code = "conflict"
    status = 409
    action = "Read it again and decide anew."


class UnprocessableInput(CallerError):
    """The request is well-formed, but a value is not acceptable."""

    code = "unprocessable"
    status = 422


class BadCheckpoint(UnprocessableInput):
    """The checkpoint is incomplete or damaged."""

    code = "bad_checkpoint"
    action = "Check the source, or download or export the checkpoint again; the message says what is missing or damaged."


class UnsupportedModel(UnprocessableInput):
    """This kind of model cannot be served."""

    code = "unsupported_model"
    action = "The message names what is missing; docs/concepts.md lists what is supported."


class UriNotAllowed(UnprocessableInput):
    """The model's URI lies outside the allowed roots."""

    code = "uri_not_allowed"
    action = "Move the model below a root, or add its root to PILOTLIGHT_MODEL_ROOTS."


class TextFailed(UnprocessableInput):
    """The model's chat template or tokenizer fails on this prompt."""

    code = "text_failed"
    action = (
        "Change the prompt; if others fail, too, the model's chat template or tokenizer has to be mended, and registered anew."
    )


class TooLarge(CallerError):
    """The request is too large."""

    code = "too_large"
    status = 413
    action = "Send less; the message names the limit."


class MessageTooLarge(TooLarge):
    """A message is beyond what the bus takes."""

    code = "message_too_large"


class BodyTimeout(CallerError):
    """The body did not arrive in time."""

    code = "body_timeout"
    status = 408
    action = "Send the whole body without long pauses; the message names the limit."


class UnsupportedEncoding(CallerError):
    """The body is encoded in a way that is not taken."""

    code = "unsupported_encoding"
    status = 415
    action = "Send the body as it is: no compression, no Content-Encoding."


class CapacityError(PilotlightError):
    """There is no room at the moment."""

    code = "no_capacity"
    status = 429
    retryable = True
    action = "Try again after the time in Retry-After; add workers if it lasts."
    openai_type = "rate_limit_error"


class TooManyHeld(CapacityError):
    """Too many requests already wait for a model to load."""

    code = "too_many_held"


class QueueFull(CapacityError):
    """The worker's queue is full."""

    code = "queue_full"


class BodiesFull(CapacityError):
    """Bodies of requests fill the memory that is meant for them."""

    code = "bodies_full"
    action = "Try again after the time in Retry-After; raise PILOTLIGHT_BODIES_BYTES if it lasts."


class NoRoom(CapacityError):
    """No room can be made for the model: everything that is loaded is in use or pinned."""

    code = "no_room"
    action = "Add a worker, unpin a model, or wait until requests in flight have ended."


class HostPoolFull(NoRoom):
    """The host pool has no room for the model, and nothing in it can be dropped."""

    code = "host_pool_full"
    action = "Raise PILOTLIGHT_POOL_BYTES, or wait until leases have ended."


class NoWorker(NoRoom):
    """No live worker can ever hold the model."""

    code = "no_worker"
    action = "See `pilotlight doctor` and /admin/v1/workers; the message says how much memory is needed."


class TransientError(PilotlightError):
    """Something is unavailable at the moment."""

    code = "unavailable"
    status = 503
    retryable = True
    action = "Try again."


class DeadlineExceeded(TransientError):
    """The deadline passed."""

    code = "deadline_exceeded"


class ControlPlaneUnavailable(TransientError):
    """No scheduler leads at the moment, so no model can be started."""

    code = "control_plane_unavailable"
    action = "Check that the scheduler and PostgreSQL run: `pilotlight logs scheduler`."


class BusUnavailable(TransientError):
    """NATS cannot be reached, or nobody answers there."""

    code = "bus_unavailable"
    action = "Check that nats-server runs and PILOTLIGHT_NATS_URL is right."


class BusDenied(BusUnavailable):
    """NATS refuses the user or the password."""

    code = "bus_denied"
    action = (
        "Give the server and the service the same password: the file that the message names in PILOTLIGHT_SECRETS_DIR, or user and "
        "password in PILOTLIGHT_NATS_URL; then start again."
    )


class BusFull(BusUnavailable):
    """NATS has no room on its disk."""

    code = "bus_full"
    action = (
        "Make room on the disk of nats-server, or lower PILOTLIGHT_EVENTS_BYTES; then start it again. One that `pilotlight up` has "
        "started is started again by itself."
    )


class DatabaseUnavailable(TransientError):
    """PostgreSQL cannot be reached."""

    code = "database_unavailable"
    action = "Check that PostgreSQL runs and PILOTLIGHT_DATABASE_URL is right."


class DatabaseDenied(DatabaseUnavailable):
    """PostgreSQL refuses the user, the password or this machine."""

    code = "database_denied"
    action = (
        "Check user and password (in PILOTLIGHT_DATABASE_URL, or the file postgres-SERVICE in PILOTLIGHT_SECRETS_DIR; migrations set "
        "the services' passwords) and that PostgreSQL's pg_hba.conf lets this machine in."
    )


class DatabaseCrowded(DatabaseUnavailable):
    """PostgreSQL takes no more connections."""

    code = "database_crowded"
    action = "Raise PostgreSQL's max_connections, or lower PILOTLIGHT_DATABASE_POOL_SIZE; or end what else is connected."


class DatabaseFull(DatabaseUnavailable):
    """PostgreSQL has no room to write."""

    code = "database_full"
    action = "Make room on the disk that PostgreSQL writes to; it goes on by itself then."


class SourceUnavailable(TransientError):
    """The model's source cannot be read."""

    code = "source_unavailable"
    action = "Check that the model's files are still where they were registered."


class SourceMissing(SourceUnavailable):
    """There is no such source: no such folder, bucket or repository."""

    code = "source_missing"
    action = "Check the model's URI, and that the folder, bucket or repository still exists."


class SourceDenied(SourceUnavailable):
    """Whoever holds the model's files refuses to give them."""

    code = "source_denied"
    action = (
        "Check the credentials: the secrets s3-access-key and s3-secret-key for s3://, hub-token (or HF_TOKEN) for hf://, and what "
        "they may read; for a folder, its owner and mode."
    )


class StoreFull(SourceUnavailable):
    """The object store has no room."""

    code = "store_full"
    action = "Make room where PILOTLIGHT_OBJECT_STORE_URL points to, and send the request again."


class PeerUnavailable(SourceUnavailable):
    """Another node gives no chunks at the moment."""

    code = "peer_unavailable"
    action = "Nothing waits for it: chunks come from other nodes or the model's source. See that node's loader if it lasts."


class PeerRefused(PeerUnavailable):
    """Two nodes do not take each other for nodes of one cluster."""

    code = "peer_refused"
    action = (
        "Give every node the same secret cluster-key and a release that speaks the same version of the link; the message says which "
        "of the two it is."
    )


class SourceChanged(TransientError):
    """The model's source is not what was registered."""

    code = "source_changed"
    action = "Register the model again: its files changed since."


class CorruptChunk(TransientError):
    """Bytes that arrived do not have the recorded digest."""

    code = "corrupt_chunk"
    action = "Check the source's storage; the message names file and range."


class NotLoaded(TransientError):
    """The worker does not hold the instance, or it is not ready."""

    code = "not_loaded"


class StaleCommand(TransientError):
    """A command carried an older epoch than one already seen."""

    code = "stale_command"


class NotLeader(TransientError):
    """This scheduler does not lead."""

    code = "not_leader"


class TextUnavailable(TransientError):
    """Prompts of this model cannot be prepared at the moment."""

    code = "text_unavailable"
    action = "Try again after the time in Retry-After; look at `pilotlight logs` for `text_helper_lost` if it lasts."


class WorkerLost(TransientError):
    """The worker that ran the request is gone."""

    code = "worker_lost"


class EngineFailed(TransientError):
    """The engine ended or refused while it ran the request."""

    code = "engine_failed"


class DeviceFailed(EngineFailed):
    """The device that ran the request has failed, by its driver."""

    code = "device_failed"
    action = "See `pilotlight node list` for the reason; docs/operations.md says what each one asks for."


class SettingsInvalid(PilotlightError):
    """A setting or secret is missing or wrong."""

    code = "settings_invalid"
    action = "Mend the setting or the file that the message names, and start again."


class MachineUnfit(PilotlightError):
    """This machine, as it is, will not do."""

    code = "machine_unfit"
    action = "Mend what the message names, and start again; `pilotlight doctor` looks at everything."


class FileLimitTooLow(MachineUnfit):
    """A process may open too few files."""

    code = "file_limit_too_low"
    action = "Raise the hard limit and start again: `ulimit -Hn 65536`, LimitNOFILE= in systemd, `ulimits: nofile` in compose."


class DiskFull(MachineUnfit):
    """There is no room on a disk."""

    code = "disk_full"
    action = "Make room on that disk, or use a folder on another one (PILOTLIGHT_HOME); then start again."


class SharedMemoryTooSmall(MachineUnfit):
    """There is not enough shared memory."""

    code = "shared_memory_too_small"
    action = "Make it larger (`mount -o remount,size=2G /dev/shm`; in a container shm_size), free some, or lower PILOTLIGHT_POOL_BYTES."


class HostPoolTaken(MachineUnfit):
    """Another loader holds the host pool."""

    code = "host_pool_taken"
    action = (
        "Stop the loader that holds it (`fuser` on the file names it), or give this one a file of its own: PILOTLIGHT_POOL_PATH."
    )


class DiskTierTaken(MachineUnfit):
    """Another loader uses the folder of the disk tier."""

    code = "disk_tier_taken"
    action = (
        "Stop the loader that uses it (`fuser` on its file `.lock` names it), or give this one its own: PILOTLIGHT_DISK_TIER_DIR."
    )


class PortTaken(MachineUnfit):
    """The gateway's address cannot be had."""

    code = "port_taken"
    action = "Stop what uses it, or choose another: --port, or PILOTLIGHT_PORT."


class FolderUnusable(MachineUnfit):
    """A folder cannot be written to."""

    code = "folder_unusable"
    action = "Make it writable for this user, or set another one: the message names the setting."


class InternalError(PilotlightError):
    """A bug in Pilotlight."""

    code = "internal"
    action = "Please report it, with the trace id and `pilotlight logs`."


def all_errors() -> tuple[type[PilotlightError], ...]:
    """Every class of the taxonomy, the root first."""
    found: list[type[PilotlightError]] = []
    stack: list[type[PilotlightError]] = [PilotlightError]
    while stack:
        current = stack.pop()
        found.append(current)
        stack.extend(current.__subclasses__())
    return tuple(found)


def error_of(code: str, message: str, retry_after_s: float | None = None) -> PilotlightError:
    """The error that a peer reported by code; an unknown code becomes ``TransientError``."""
    for kind in all_errors():
        if kind.code == code and "code" in vars(kind):
            return kind(message, retry_after_s=retry_after_s)
    return TransientError(f"{code}: {message}", retry_after_s=retry_after_s)
