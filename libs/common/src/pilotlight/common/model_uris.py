"""What a model's URI says: ``file:///folder``, ``s3://bucket/prefix`` or
``hf://org/name[@revision]``.

Strict, since a URI comes from outside and decides what is read: nothing is decoded, normalised or
guessed that could make two readers understand two things. A URI names a place; servers, credentials
and options are settings.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pilotlight.common.errors import UriNotAllowed

MAX_URI_CHARS = 2048
MAX_REVISION_CHARS = 200
FORMS = "file:///folder, s3://bucket/prefix or hf://org/name[@revision]"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9!$&'()+,.:;=@_~ -]{1,255}")
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class FolderUri:
    """A folder of this host, as it was named: links and dots are not resolved yet."""

    path: Path


@dataclass(frozen=True, slots=True)
class S3Uri:
    """The objects below a prefix of a bucket."""

    bucket: str
    prefix: tuple[str, ...]
    """Segments, as ``/`` parts them; empty for the whole bucket."""

    def __str__(self) -> str:
        return "s3://" + "/".join((self.bucket, *self.prefix))


@dataclass(frozen=True, slots=True)
class HubUri:
    """A repository of the hub at one of its revisions."""

    org: str
    name: str
    revision: str | None = None
    """A branch, tag or commit; None: the repository's main branch."""

    @property
    def repository(self) -> str:
        """As the hub names it."""
        return f"{self.org}/{self.name}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit: what it names can then never be something else."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (
            f"@{self.revision}" if self.revision is not None else ""
        )


ModelUri = FolderUri | S3Uri | HubUri


def parse_uri(uri: str) -> ModelUri:
    """Take a URI apart. The scheme may be in upper case; an absolute path is a folder.

    Raises:
        UriNotAllowed: it is none of the three forms; the message says what is wrong with it.
    """
    try:
        return _parse(uri)
    except ValueError as error:
        raise UriNotAllowed(f"{_shown(uri)}: {error}", param="uri") from error


def parse_bucket(text: str) -> tuple[str, tuple[str, ...]]:
    """Bucket and prefix segments of what stands behind ``s3://``.

    One slash at the end is of no meaning.

    Raises:
        ValueError: it is not ``bucket`` or ``bucket/prefix``.
    """
    bucket, slash, rest = text.partition("/")
    if _BUCKET.fullmatch(bucket) is None or ".." in bucket:
        raise ValueError(
            f"{bucket!r} is not the name of a bucket: 3 to 63 lower-case letters, digits, dots and hyphens"
        )
    rest = rest.removesuffix("/")
    prefix = tuple(rest.split("/")) if slash and rest else ()
    for segment in prefix:
        if segment in (".", ".."):
            raise ValueError("a prefix has no `.` or `..`")
        if not segment:
            raise ValueError("a prefix has no empty segment (`//`)")
        if "%" in segment or _SEGMENT.fullmatch(segment) is None:
            raise ValueError(
                f"{segment!r} holds characters that a prefix may not have; nothing is percent-encoded in one"
            )
    return bucket, prefix


def parse_revision(text: str) -> str:
    """A branch, tag or commit.

    Raises:
        ValueError: it cannot be one.
    """
    if len(text) > MAX_REVISION_CHARS or ".." in text or _REVISION.fullmatch(text) is None:
        raise ValueError(f"{_shown(text)} is not a revision: give a branch, a tag or a commit")
    return text


def parse_repository(text: str) -> tuple[str, ...]:
    """The names in ``org/name`` or ``org``.

    Raises:
        ValueError: one of them cannot be a name on a hub.
    """
    names = tuple(text.split("/"))
    for name in names:
        if (
            _HUB_NAME.fullmatch(name) is None
            or ".." in name
            or "--" in name
            or name.endswith((".git", "."))
        ):
            raise ValueError(f"{name!r} is not a name on the hub")
    return names


def _parse(uri: str) -> ModelUri:
    if len(uri) > MAX_URI_CHARS:
        raise ValueError(f"a model URI has at most {MAX_URI_CHARS} characters")
    if not uri.isprintable() or not unquote(uri, errors="replace").isprintable():
        raise ValueError("a model URI has no control characters, also not percent-encoded")
    if uri.startswith("/"):
        return FolderUri(Path(uri))
    scheme, separator, rest = uri.partition("://")
    kind = scheme.lower()
    if not separator or kind not in ("file", "s3", "hf"):
        raise ValueError(f"give {FORMS}")
    if kind == "file":
        return FolderUri(_folder(uri))
    # What a URI could smuggle in: credentials, options, another server.
    if "?" in rest or "#" in rest:
        raise ValueError("it takes no `?` or `#`: endpoints and options are settings")
    if kind == "s3":
        if "@" in rest.partition("/")[0] or ":" in rest.partition("/")[0]:
            raise ValueError(
                "it holds a bucket and a prefix alone: endpoint and credentials are settings and secrets"
            )
        return S3Uri(*parse_bucket(rest))
    return _hub(rest)


def _folder(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError("give an absolute folder, as file:///folder")
    if parts.query or parts.fragment:
        raise ValueError("write `?` as %3F and `#` as %23")
    return Path(unquote(parts.path))


def _hub(rest: str) -> HubUri:
    repository, at, revision = rest.partition("@")
    names = parse_repository(repository)
    if len(names) != 2:
        raise ValueError("a repository is named org/name")
    return HubUri(*names, parse_revision(revision) if at else None)


def _shown(text: str) -> str:
    """Foreign text, fit for a message."""
    return repr(text if len(text) <= 200 else f"{text[:197]}...")
