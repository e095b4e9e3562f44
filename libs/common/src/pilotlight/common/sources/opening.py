"""From a model's URI to its source: the one place that decides what is read, used at registration
and by every loader.
"""

import os
from dataclasses import dataclass

from pilotlight.checkpoint.reader import FolderSource, Source
from pilotlight.common.errors import SettingsInvalid, UnprocessableInput
from pilotlight.common.model_roots import ModelRootsSettings, pinned
from pilotlight.common.model_uris import FolderUri, HubUri, S3Uri, parse_revision
from pilotlight.common.secret_files import read_secret
from pilotlight.common.sources.http import GuardedHttp
from pilotlight.common.sources.hub import HubSource
from pilotlight.common.sources.ranged import Patience
from pilotlight.common.sources.s3 import S3Source


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSource:
    """A source at what it is now, and the URI under which it will be that for ever, or say that it
    is not.
    """

    source: Source
    uri: str
    revision: str | None
    """What was asked for, where the source has revisions."""


class Sources:
    """Opens what the roots allow. Nothing is sent before a source is read."""

    def __init__(self, settings: ModelRootsSettings, patience: Patience) -> None:
        """Take the settings of one process.

        Raises:
            SettingsInvalid: the hub's token cannot be read.
        """
        self._settings = settings
        self._roots = settings.roots()
        self._patience = patience
        self._hub_token = _hub_token(settings)

    def pin(self, uri: str, revision: str | None = None) -> PinnedSource:
        """Open what is to be registered; blocks.

        Raises:
            UriNotAllowed: the URI is malformed, or lies below no root.
            UnprocessableInput: a revision of what has none, or two of them.
            SourceMissing: there is no such folder.
            CheckpointError: what the hub says when it is asked for the commit.
        """
        parsed = self._roots.check(uri)
        if not isinstance(parsed, HubUri):
            if revision is not None:
                raise UnprocessableInput(
                    "a folder or a bucket has no revisions: leave `revision` out", param="revision"
                )
            return PinnedSource(source=self._source(parsed), uri=_written(parsed), revision=None)
        asked = _one_revision(parsed, revision)
        source = self._hub(HubUri(parsed.org, parsed.name, asked))
        try:
            return PinnedSource(source=source, uri=str(source.pin()), revision=asked)
        except BaseException:
            source.close()
            raise

    def open(self, uri: str) -> Source:
        """Open what was registered.

        Raises:
            UriNotAllowed: the URI lies below no root of this process, or is not pinned.
            SourceMissing: there is no such folder.
            SettingsInvalid: the S3 settings cannot be used.
        """
        parsed = self._roots.check(uri)
        pinned(parsed)
        return self._hub(parsed) if isinstance(parsed, HubUri) else self._source(parsed)

    def _source(self, uri: FolderUri | S3Uri) -> Source:
        if isinstance(uri, FolderUri):
            return FolderSource(uri.path, self._roots.hold)
        return S3Source(uri, self._settings, self._patience)

    def _hub(self, uri: HubUri) -> HubSource:
        private = tuple(
            host.strip() for host in self._settings.hub_private_hosts.split(",") if host.strip()
        )
        endpoint = self._settings.hub_endpoint
        http = GuardedHttp(
            endpoint, self._hub_token, private, read_timeout_s=self._patience.stall_timeout_s
        )
        return HubSource(uri, endpoint, http, self._patience)


def _written(uri: FolderUri | S3Uri) -> str:
    return uri.path.as_uri() if isinstance(uri, FolderUri) else str(uri)


def _one_revision(uri: HubUri, revision: str | None) -> str:
    if revision is None or uri.revision is None:
        asked = revision if revision is not None else uri.revision
    elif revision == uri.revision:
        asked = revision
    else:
        raise UnprocessableInput(
            f"the URI names revision {uri.revision!r} and `revision` says another", param="revision"
        )
    try:
        return parse_revision(asked) if asked is not None else "main"
    except ValueError as error:
        raise UnprocessableInput(str(error), param="revision") from error


def _hub_token(settings: ModelRootsSettings) -> str | None:
    try:
        token = read_secret(settings.secrets_dir, "hub-token") or os.environ.get("HF_TOKEN")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(
            f"the secret hub-token in {settings.secrets_dir} cannot be read: {error}"
        ) from error
    if token and not (token.isascii() and token.isprintable()):
        raise SettingsInvalid(
            "the hub's token holds characters that no token has; see the secret hub-token, or HF_TOKEN"
        )
    return token or None
