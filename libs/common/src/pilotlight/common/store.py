"""The object store: manifests, text bundles and artifacts, content-addressed, on S3 or in a folder.

An object's key holds the digest of its content, so it is written once and never changes: whoever finds the key taken is done.
"""

from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, S3Store

from pilotlight.common.errors import BadRequest, DeadlineExceeded, NotFound, SourceUnavailable
from pilotlight.common.waiting import within
from pilotlight.policy.types import Digest

DEADLINE_S = 60.0
"""For one object: manifests, bundles and artifacts are megabytes. Parameters do not come through here."""

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
    def from_url(cls, url: str) -> "ObjectStore":
        """Open a store; a folder is made where it does not exist.

        ``file:///folder`` (or ``file://folder``, relative to the working directory), ``s3://bucket/prefix`` (credentials and
        endpoint from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL), or ``memory://``
        for tests.

        Raises:
            BadRequest: the scheme is not one of these, or the folder cannot be made.
        """
        scheme, separator, rest = url.partition("://")
        if scheme == "file" and rest:
            try:
                return cls(LocalStore(Path(rest).expanduser().resolve(), mkdir=True), url)
            except (BaseError, OSError) as error:
                raise BadRequest(f"the object store {url} cannot be opened: {error}; see PILOTLIGHT_OBJECT_STORE_URL") from error
        if scheme == "s3" and rest:
            bucket, _, prefix = rest.partition("/")
            store = S3Store(
                bucket,
                prefix=prefix or None,
                client_options={"timeout": timedelta(seconds=30), "connect_timeout": timedelta(seconds=5)},
                retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=30)},
            )
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
            await self._within(obstore.put_async(self._store, key, data, mode="create"), f"writing {key}")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise SourceUnavailable(f"cannot write {key} to {self.url}: {error}") from error
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
            raise NotFound(f"{self.url} holds no {key}") from error
        except (BaseError, OSError) as error:
            raise SourceUnavailable(f"cannot read {key} from {self.url}: {error}") from error

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
            raise SourceUnavailable(f"cannot look for {key} in {self.url}: {error}") from error
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
            raise SourceUnavailable(f"cannot remove {key} from {self.url}: {error}") from error

    async def _read(self, key: str) -> obstore.Bytes:
        found = await obstore.get_async(self._store, key)
        return await found.bytes_async()

    async def _within(self, work: Awaitable[T], what: str) -> T:
        try:
            return await within(DEADLINE_S, work, what)
        except DeadlineExceeded as error:
            raise SourceUnavailable(f"{self.url}: {error.message}") from error
