"""Last-value buckets (NATS KV): the last state of every gateway, node, worker, instance and copy, for late joiners.

Written on change, without TTL. An empty bucket says nothing: absence is never deletion.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js.api import KeyValueConfig
from nats.js.kv import KeyValue

from pilotlight.common.errors import BusUnavailable, MessageUndecodable
from pilotlight.common.messages.codec import decode_json, encode_json
from pilotlight.common.waiting import pause

log = structlog.get_logger()

GATEWAYS = "gateways"
INSTANCES = "instances"
COPIES = "copies"
NODES = "nodes"
WORKERS = "workers"

T = TypeVar("T")


class Bucket(Protocol):
    """One bucket. Keys are ids; values are messages or fact dataclasses as JSON."""

    async def put(self, key: str, value: object) -> None:
        """Write the last value of a key.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove a key: what it named is gone for good."""
        ...

    async def watch(self, value_type: type[T], on_change: Callable[[str, T | None], Awaitable[None]]) -> None:
        """Deliver every present value, then every change, for ever; None for a removed key. Resumes after a break by itself."""
        ...


class NatsBucket:
    """``Bucket`` on JetStream key-value."""

    def __init__(self, store: KeyValue, name: str) -> None:
        self._store = store
        self._name = name

    @classmethod
    async def open(cls, client: Client, name: str) -> "NatsBucket":
        """Open a bucket, making it first where it does not exist.

        Raises:
            BusUnavailable: the server did not confirm.
        """
        stream = client.jetstream(timeout=5.0)
        try:
            try:
                return cls(await stream.key_value(name), name)
            except nats.js.errors.BucketNotFoundError:
                return cls(await stream.create_key_value(KeyValueConfig(bucket=name, history=1)), name)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(f"cannot open the bucket {name}: {error}") from error

    async def put(self, key: str, value: object) -> None:
        try:
            await self._store.put(key, encode_json(value))
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(f"cannot write {key} to the bucket {self._name}: {error}") from error

    async def delete(self, key: str) -> None:
        try:
            await self._store.delete(key)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(f"cannot remove {key} from the bucket {self._name}: {error}") from error

    async def watch(self, value_type: type[T], on_change: Callable[[str, T | None], Awaitable[None]]) -> None:
        while True:
            try:
                await self._watch_once(value_type, on_change)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.warning("watch broke; starting anew", action="bucket_watch_restart", bucket=self._name, error=repr(error))
            await pause(0.2)

    async def _watch_once(self, value_type: type[T], on_change: Callable[[str, T | None], Awaitable[None]]) -> None:
        watcher = await self._store.watchall()
        try:
            while True:
                try:
                    entry = await watcher.updates(timeout=30.0)
                except (nats.errors.TimeoutError, asyncio.TimeoutError):
                    continue
                if entry is None:
                    continue
                if entry.operation in ("DEL", "PURGE") or entry.value is None:
                    await on_change(entry.key, None)
                    continue
                try:
                    value = decode_json(entry.value, value_type)
                except MessageUndecodable as error:
                    log.error("value dropped", action="bucket_undecodable", bucket=self._name, key=entry.key, error=error.message)
                    continue
                await on_change(entry.key, value)
        finally:
            await watcher.stop()
