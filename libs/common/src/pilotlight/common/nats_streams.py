"""The streams that services share on NATS: events, and buckets of last values. Made by an
administrator; services find them.
"""

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig

from pilotlight.common.buckets import jetstream
from pilotlight.common.errors import BusFull, BusUnavailable
from pilotlight.common.messages import events
from pilotlight.common.nats_bus import bucket_name

EVENTS_KEPT_DAYS = 7.0
DUPLICATES_SEEN_FOR_S = 600
"""An event that is published again within this time is stored once."""
_NO_STORAGE = 10047
"""What the server says when streams may together take more than it has."""
_OF_EVENTS = (
    "subjects",
    "retention",
    "storage",
    "discard",
    "max_age",
    "max_bytes",
    "duplicate_window",
    "num_replicas",
)


async def ensure_events(
    client: Client,
    prefix: str,
    size_bytes: int,
    keep_days: float = EVENTS_KEPT_DAYS,
    replicas: int = 1,
) -> None:
    """Make the stream of events, or make it equal to this release's.

    Args:
        client: a connection with the right to manage streams.
        prefix: the installation's, before every subject.
        size_bytes: beyond it the oldest events go.
        keep_days: after which an event goes.
        replicas: on how many servers of a cluster events are kept.

    Raises:
        BusUnavailable: the server did not confirm.
        BusFull: it has no room for the stream.
    """
    config = StreamConfig(
        name=events_stream(prefix),
        subjects=[prefix + events.EVENT_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=keep_days * 24 * 3600,
        max_bytes=size_bytes,
        duplicate_window=DUPLICATES_SEEN_FOR_S,
        num_replicas=replicas,
    )
    stream = jetstream(client)
    try:
        try:
            found = (await stream.stream_info(config.name)).config
            # The server may have no room to promise anew what this stream has already.
            if any(getattr(found, name) != getattr(config, name) for name in _OF_EVENTS):
                await stream.update_stream(config)
        except nats.js.errors.NotFoundError:
            await stream.add_stream(config)
    except nats.js.errors.APIError as error:
        if error.err_code == _NO_STORAGE:
            raise BusFull(
                f"NATS has no room for the stream {config.name} of {size_bytes} bytes (PILOTLIGHT_EVENTS_BYTES): its streams may "
                "together take more than it is told to store (max_file_store, PILOTLIGHT_NATS_STORE_BYTES)"
            ) from error
        raise BusUnavailable(f"the stream {config.name} cannot be made: {error}") from error
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise BusUnavailable(f"the stream {config.name} cannot be made: {error!r}") from error


async def ensure_bucket(client: Client, name: str, replicas: int) -> None:
    """Make a bucket, or keep it on another number of servers.

    Raises:
        BusUnavailable: the server did not confirm.
    """
    stream = jetstream(client)
    try:
        try:
            config = (await stream.stream_info(f"KV_{name}")).config
        except nats.js.errors.NotFoundError:
            await stream.create_key_value(KeyValueConfig(bucket=name, history=1, replicas=replicas))
            return
        if config.num_replicas != replicas:
            config.num_replicas = replicas
            await stream.update_stream(config)
    except (nats.errors.Error, TimeoutError, OSError) as error:
        raise BusUnavailable(f"the bucket {name} cannot be made: {error}") from error


def events_stream(prefix: str) -> str:
    """Name of the stream of events."""
    return bucket_name(prefix, events.EVENTS_STREAM)
