"""Which places models may come from: ``PILOTLIGHT_MODEL_ROOTS``, checked by the gateway at
registration and by every loader again.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, field_validator

from pilotlight.common.errors import SourceMissing, UriNotAllowed
from pilotlight.common.model_uris import (
    FORMS,
    FolderUri,
    HubUri,
    ModelUri,
    S3Uri,
    parse_bucket,
    parse_repository,
    parse_uri,
)
from pilotlight.common.settings import S3Settings, checked_endpoint


class ModelRootsSettings(S3Settings):
    """Where models may lie, and how the hub is reached.

    The hub's token is the secret `hub-token`, else HF_TOKEN.
    """

    model_roots: str = Field(
        ".pilotlight/models",
        description="Where models may be registered from, separated by commas: folders, `s3://bucket/prefix`, `hf://org` (or `hf://` for "
        "every organisation), each with all that is below it. Nothing else is ever read.",
    )
    hub_endpoint: str = Field(
        "https://huggingface.co",
        description="URL of the hub that `hf://` models come from, or of a mirror of it.",
    )
    hub_private_hosts: str = Field(
        "",
        description="Servers of your own network, as `host` or `host:port`, separated by commas, to which the hub may send readers for a "
        "file's bytes. Others are reached only at public addresses.",
    )

    @field_validator("model_roots")
    @classmethod
    def _are_roots(cls, value: str) -> str:
        ModelRoots.parse(value)
        return value

    @field_validator("hub_endpoint")
    @classmethod
    def _is_a_hub(cls, value: str) -> str:
        return checked_endpoint(value)

    def roots(self) -> "ModelRoots":
        """The roots, folders made absolute."""
        return ModelRoots.parse(self.model_roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoots:
    """Allowed places."""

    folders: tuple[Path, ...] = ()
    """With symbolic links resolved."""
    buckets: tuple[S3Uri, ...] = ()
    hub: tuple[tuple[str, ...], ...] = ()
    """Leading names of repositories: none for the whole hub, an organisation, or organisation and
    name."""

    @classmethod
    def parse(cls, text: str) -> "ModelRoots":
        """From a comma-separated list.

        Raises:
            ValueError: a root is neither a folder nor a bucket nor part of the hub.
        """
        folders: list[Path] = []
        buckets: list[S3Uri] = []
        hub: list[tuple[str, ...]] = []
        for root in (part.strip() for part in text.split(",")):
            scheme, separator, rest = root.partition("://")
            kind = scheme.lower() if separator else ""
            try:
                if kind == "s3":
                    buckets.append(S3Uri(*parse_bucket(rest)))
                elif kind == "hf":
                    hub.append(_hub_root(rest.removesuffix("/")))
                elif kind not in ("", "file"):
                    raise ValueError("give a folder, s3://bucket/prefix or hf://org")
                elif root:
                    uri = parse_uri(root) if kind else FolderUri(Path(root).expanduser())
                    assert isinstance(uri, FolderUri)
                    folders.append(uri.path.resolve())
            except (ValueError, UriNotAllowed) as error:
                raise ValueError(f"PILOTLIGHT_MODEL_ROOTS: {root!r}: {error}") from error
        return cls(folders=tuple(folders), buckets=tuple(buckets), hub=tuple(hub))

    def check(self, uri: str) -> ModelUri:
        """What a model's URI names, if it may be read.

        Of a folder, links and dots are resolved; nothing is sent anywhere.

        Raises:
            UriNotAllowed: the URI is malformed, or lies below no root.
            SourceMissing: there is no such folder.
        """
        parsed = parse_uri(uri)
        if isinstance(parsed, FolderUri):
            return self._check_folder(parsed.path)
        if isinstance(parsed, S3Uri):
            allowed = any(
                parsed.bucket == root.bucket and _below(parsed.prefix, root.prefix)
                for root in self.buckets
            )
        else:
            allowed = any(_below((parsed.org, parsed.name), root) for root in self.hub)
        if not allowed:
            raise self._refusal(str(parsed))
        return parsed

    def hold(self, resolved: Path) -> bool:
        """Whether a path, its links and dots resolved, lies below a root."""
        return any(resolved.is_relative_to(folder) for folder in self.folders)

    def __str__(self) -> str:
        hub = (f"hf://{'/'.join(names)}" for names in self.hub)
        return ", ".join((*map(str, self.folders), *map(str, self.buckets), *hub)) or "none"

    def _check_folder(self, path: Path) -> FolderUri:
        # Path.resolve() raises for links that lead in a circle, and until Python 3.13 it is a
        # RuntimeError.
        resolved = Path(os.path.realpath(path))
        if not self.hold(resolved):
            raise self._refusal(str(resolved))
        try:
            resolved.stat()
        except OSError as error:
            raise SourceMissing(
                f"there is no folder {resolved}: {error.strerror}", param="uri"
            ) from error
        if not resolved.is_dir():
            raise SourceMissing(f"{resolved} is not a folder", param="uri")
        return FolderUri(resolved)

    def _refusal(self, place: str) -> UriNotAllowed:
        return UriNotAllowed(
            f"{place} is not below an allowed root (PILOTLIGHT_MODEL_ROOTS: {self})", param="uri"
        )


def pinned(uri: ModelUri) -> None:
    """Check what a loader is told to read: of a hub, only commits, since a branch may move between
    two reads.

    Raises:
        UriNotAllowed: it is a branch or a tag.
    """
    if isinstance(uri, HubUri) and not uri.pinned:
        raise UriNotAllowed(
            f"{uri} names no commit: register the model again ({FORMS})", param="uri"
        )


def _hub_root(rest: str) -> tuple[str, ...]:
    names = parse_repository(rest) if rest else ()
    if len(names) > 2:
        raise ValueError("a root of the hub is hf://, hf://org or hf://org/name")
    return names


def _below(names: tuple[str, ...], root: tuple[str, ...]) -> bool:
    """Whether a root's segments are the first of these: whole ones, so that ``models`` does not
    hold ``models-of-others``.
    """
    return names[: len(root)] == root
