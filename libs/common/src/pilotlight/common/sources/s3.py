"""Models in a bucket: every range is asked for with the ETag that registration saw."""

from collections.abc import Generator

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from pilotlight.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    SourceChanged,
    SourceDenied,
    SourceMissing,
    SourceUnavailable,
)
from pilotlight.checkpoint.folders import belongs
from pilotlight.checkpoint.reader import MAX_FILES, SourceFile
from pilotlight.common.model_uris import S3Uri
from pilotlight.common.s3 import S3Fault, s3_store
from pilotlight.common.settings import S3Settings
from pilotlight.common.sources.ranged import Broken, Patience, RangedSource

PIECE_BYTES = 64 * 1024
"""What is handed on at once: small enough that a slow connection shows its progress."""
MAX_LISTED = 10 * MAX_FILES
"""Objects that are looked at when a prefix is listed, those in folders below it included."""
_PINNED = "etag-"


class S3Source(RangedSource):
    """The objects right below a prefix. Endpoint and credentials are those of the settings."""

    def __init__(self, uri: S3Uri, settings: S3Settings, patience: Patience | None = None) -> None:
        """Nothing is sent yet.

        Raises:
            SettingsInvalid: the settings cannot be used.
        """
        patience = patience or Patience()
        super().__init__(patience)
        self._uri = uri
        # Whatever can be tried again is tried here, where it is known how far the read is.
        self._store: S3Store = s3_store(
            settings,
            uri.bucket,
            "/".join(uri.prefix),
            read_timeout_s=patience.stall_timeout_s,
            retries=0,
        )

    def list_files(self) -> tuple[SourceFile, ...]:
        """As ``Source.list_files``; what lies in folders below the prefix is left out.

        Raises:
            SourceMissing: there is no such bucket, or nothing below the prefix.
            SourceDenied: the credentials are not good for it.
            BadCheckpoint: there is too much.
        """
        for attempt in range(self._patience.tries):
            try:
                return self._list()
            except Broken as error:
                self._wait(attempt, error)
        raise AssertionError("the last try returns or raises")

    def stream(self, file: SourceFile, start: int, stop: int) -> Generator[bytes]:
        """As ``RangedSource.stream``."""
        etag = file.version.removeprefix(_PINNED)
        try:
            answer = obstore.get(
                self._store, file.name, options={"range": (start, stop), "if_match": etag}
            )
            meta = answer.meta
            # Not every server heeds If-Match.
            if meta["e_tag"] != etag or meta["size"] != file.size_bytes:
                raise SourceChanged(
                    f"the object is another one now: ETag {meta['e_tag']}, {meta['size']} bytes",
                    file=file.name,
                )
            yield from answer.stream(min_chunk_size=PIECE_BYTES)
        except (BaseError, OSError) as error:
            raise self._failure(error, file.name) from error

    def _list(self) -> tuple[SourceFile, ...]:
        found: list[SourceFile] = []
        listed = 0
        try:
            # pyright sees overloads of it that are not called here.
            for batch in obstore.list(self._store, chunk_size=1000):  # pyright: ignore[reportUnknownMemberType] - obstore types its streams in part alone
                listed += len(batch)
                if len(found) > MAX_FILES or listed > MAX_LISTED:
                    raise BadCheckpoint(
                        f"{self._uri} holds too many objects: name the model's own prefix"
                    )
                for meta in batch:
                    name = meta["path"]
                    if name and belongs(name):
                        found.append(_pin(name, meta["size"], meta["e_tag"]))
        except (BaseError, OSError) as error:
            raise self._failure(error, None) from error
        if not found:
            raise SourceMissing(f"there is nothing below {self._uri}")
        return tuple(sorted(found, key=lambda file: file.name))

    def _failure(self, error: Exception, file: str | None) -> CheckpointError | Broken:
        fault = S3Fault.of(error)
        where = f"s3://{self._uri.bucket}"
        if fault.status == 412:
            return SourceChanged("the object is another one now", file=file)
        if fault.status == 416:
            return SourceChanged("the object is shorter now", file=file)
        if fault.missing and file is not None and fault.code != "NoSuchBucket":
            return SourceChanged("the object is gone", file=file)
        if fault.missing:
            return SourceMissing(f"there is no bucket {where} ({fault.text})")
        if fault.denied:
            return SourceDenied(
                f"{where} refuses what we ask for ({fault.text}): wrong credentials, or they may not do this",
                file=file,
            )
        if fault.lasting:
            return SourceUnavailable(
                f"{where}: {fault.text}; check PILOTLIGHT_S3_ENDPOINT and PILOTLIGHT_S3_REGION",
                file=file,
            )
        return Broken(f"{where}: {fault.text}")


def _pin(name: str, size_bytes: int, etag: str | None) -> SourceFile:
    if not etag or etag.startswith("W/"):
        raise SourceUnavailable(
            f"the server gives {'a weak' if etag else 'no'} ETag, so that nobody can tell when the object changes",
            file=name,
        )
    return SourceFile(name=name, size_bytes=size_bytes, version=f"{_PINNED}{etag}")
