"""Something failed: trying again can help."""

from pilotlight.common.errors.base import TransientError


class DeadlineExceeded(TransientError):
    """The deadline passed."""

    code = "deadline_exceeded"


class ControlPlaneUnavailable(TransientError):
    """No scheduler leads at the moment, so no model can be started."""

    code = "control_plane_unavailable"
    action = "Check that the scheduler and PostgreSQL run: `pilotlight logs scheduler`."


class BusUnavailable(TransientError):
    """NATS cannot be reached, or no service answers there."""

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
    """The server that has the model's files refuses to give them."""

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
    action = "See `pilotlight node list` for the reason; docs/operations/bad-day.md says what each one asks for."


class RestoreFailed(EngineFailed):
    """A stage could not be restored from its artifact, or does not compute what it did when that
    was made.
    """

    code = "restore_failed"
    action = "The next start computes everything itself; `pilotlight materialize MODEL` builds the artifact again."
