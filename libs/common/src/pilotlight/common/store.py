"""The object store: manifests, text bundles and artifacts, content-addressed, on S3 or in a folder.

An object's key holds the digest of its content, so it is written once and never changes: a writer
that finds the key taken is done.
"""

from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, S3Store

from pilotlight.common.errors import (
    BadRequest,
    DeadlineExceeded,
    NotFound,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
    StoreFull,
)
from pilotlight.common.model_uris import parse_bucket
from pilotlight.common.s3 import S3Fault, s3_store
from pilotlight.common.settings import S3Settings
from pilotlight.common.waiting import within
from pilotlight.policy.ids import Digest

DEADLINE_S = 60.0
"""For one object: manifests, bundles and artifacts are megabytes. Parameters do not come through
here."""
NO_SUCH_BUCKET = "NoSuchBucket"
NO_SPACE = "No space left on device"
SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
"""What S3 servers say to a signature of another hour."""
INSUFFICIENT_STORAGE = 507
QUOTA = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage")

T = TypeVar("T")


def manifest_key(digest: Digest) -> str:
    """Where a checkpoint's manifest lies."""
    return f"manifests/{digest}.json"


def text_key(digest: Digest) -> str:
    """Where a text bundle lies."""
    return f"text/{digest}.json"


def artifact_key(digest: Digest) -> str:
    """Where an artifact's blob lies."""
    return f"artifacts/{digest}"


class ObjectStore:
    """Objects by key."""

    def __init__(self, store: LocalStore | MemoryStore | S3Store, url: str) -> None:
        self._store = store
        self.url = url

    @classmethod
    def from_url(cls, url: str, s3: S3Settings | None = None) -> "ObjectStore":
        """Open a store; a folder is made where it does not exist.

        ``file:///folder`` (or ``file://folder``, relative to the working directory),
        ``s3://bucket/prefix`` (endpoint and credentials from ``s3``, by default from the
        environment), or ``memory://`` for tests.

        Raises:
            BadRequest: the scheme is not one of these, or the folder cannot be made.
            SettingsInvalid: the S3 settings cannot be used.
        """
        scheme, separator, rest = url.partition("://")
        if scheme == "file" and rest:
            try:
                return cls(LocalStore(Path(unquote(rest)).expanduser().resolve(), mkdir=True), url)
            except (BaseError, OSError) as error:
                raise BadRequest(
                    f"the object store {url} cannot be opened: {error}; see PILOTLIGHT_OBJECT_STORE_URL"
                ) from error
        if scheme == "s3" and rest:
            try:
                bucket, prefix = parse_bucket(rest)
            except ValueError as error:
                raise BadRequest(
                    f"the object store {url!r}: {error}; see PILOTLIGHT_OBJECT_STORE_URL"
                ) from error
            store = s3_store(s3 or S3Settings(), bucket, "/".join(prefix))
            return cls(store, url)
        if scheme == "memory" and separator:
            return cls(MemoryStore(), url)
        raise BadRequest(
            f"{url!r} is not an object store; set PILOTLIGHT_OBJECT_STORE_URL to file:///folder or s3://bucket/prefix"
        )

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless its key is taken; False when it was.

        Raises:
            SourceUnavailable: the store cannot be written.
        """
        try:
            await self._within(
                obstore.put_async(self._store, key, data, mode="create"), f"writing {key}"
            )
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise self._failure(f"cannot write {key} to {self.url}", error) from error
        return True

    async def get(self, key: str) -> bytes:
        """Read an object.

        Raises:
            NotFound: no object has the key.
            SourceUnavailable: the store cannot be read.
        """
        try:
            return bytes(await self._within(self._read(key), f"reading {key}"))
        except FileNotFoundError as error:
            if S3Fault.of(error).code == NO_SUCH_BUCKET:
                raise self._failure(f"cannot read {key} from {self.url}", error) from error
            raise NotFound(f"{self.url} holds no {key}") from error
        except (BaseError, OSError) as error:
            raise self._failure(f"cannot read {key} from {self.url}", error) from error

    async def exists(self, key: str) -> bool:
        """Whether an object has the key.

        Raises:
            SourceUnavailable: the store cannot be read.
        """
        try:
            await self._within(obstore.head_async(self._store, key), f"looking for {key}")
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise self._failure(f"cannot look for {key} in {self.url}", error) from error
        return True

    async def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none.

        Raises:
            SourceUnavailable: the store cannot be written.
        """
        try:
            await self._within(obstore.delete_async(self._store, key), f"removing {key}")
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._failure(f"cannot remove {key} from {self.url}", error) from error

    async def _read(self, key: str) -> obstore.Bytes:
        found = await obstore.get_async(self._store, key)
        return await found.bytes_async()

    def _failure(self, what: str, error: Exception) -> SourceUnavailable:
        """What the user can do about it depends on whose fault it is."""
        if not isinstance(self._store, S3Store):
            told = next(iter(str(error).splitlines()), repr(error))
            kind = StoreFull if NO_SPACE in told else SourceUnavailable
            return kind(f"{what}: {told}")
        fault = S3Fault.of(error)
        if fault.code in SKEWED:
            return SourceUnavailable(
                f"{what}: {fault.text}: this machine's clock is wrong, or the server's; let a time service keep both"
            )
        if fault.status == INSUFFICIENT_STORAGE or fault.code in QUOTA:
            return StoreFull(f"{what}: {fault.text}")
        if fault.denied:
            return SourceDenied(f"{what}: {fault.text}")
        if fault.missing:
            return SourceMissing(
                f"{what}: there is no such bucket ({fault.text}); make it, or see PILOTLIGHT_OBJECT_STORE_URL"
            )
        return SourceUnavailable(f"{what}: {fault.text}; see PILOTLIGHT_S3_ENDPOINT")

    async def _within(self, work: Awaitable[T], what: str) -> T:
        try:
            return await within(DEADLINE_S, work, what)
        except DeadlineExceeded as error:
            raise SourceUnavailable(f"{self.url}: {error.message}") from error
