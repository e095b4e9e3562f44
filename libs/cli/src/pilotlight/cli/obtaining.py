"""Models that are not registered yet: from a folder, a hub or a bucket to a name that can be asked.

A system reads models below its roots alone, and those are closed at first. What lies elsewhere is
copied below one of them, into the state folder's ``models``, after a question that says what and
how much that is. See decision 47.
"""

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.cli.checkpoint_copy import (
    Contents,
    contents_of,
    copy,
    is_copy,
    link,
    source_of,
)
from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.models import MIB, uri_of
from pilotlight.cli.options import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS
from pilotlight.cli.output import errors
from pilotlight.common.errors import (
    AlreadyExists,
    BadRequest,
    ModelNotFound,
    SourceUnavailable,
    UnprocessableInput,
    UriNotAllowed,
    error_of,
)
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.model_uris import FORMS, FolderUri, HubUri, S3Uri, parse_uri
from pilotlight.common.sources.opening import Sources
from pilotlight.common.sources.ranged import Patience

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME_CHARS = 128
PATIENCE = Patience(tries=4)
NAMED_MODELS = 8
"""Of those that there are, in a message."""

Ask = Callable[[str, str], bool]
"""Told what would happen, and asked whether it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obtaining:
    """How a model is obtained."""

    client: AdminClient
    home: Home
    elsewhere: bool
    """The system may run on another machine: nothing can be put into its state folder."""
    ask: Ask
    quiet: bool = False
    """Show no progress."""

    def known(self) -> list[str]:
        """Names of registered models."""
        return [model["name"] for model in self.client.get("/models")["models"]]

    def model(self, asked: str, name: str | None = None) -> str:
        """The name to ask for: of a registered model, or of one that is registered by this.

        Args:
            asked: A name or a source.
            name: What a source is to be called; None: a name that follows from it.

        Raises:
            ModelNotFound: it is neither the name of a model, nor a source.
            PilotlightError: the source will not do, or may not be copied.
        """
        known = self.known()
        if asked in known:
            return asked
        if is_source(asked):
            return self.source(asked, name=name)["name"]
        if asked == DEMO_MODEL:
            ensure_demo_model(self.client)
            return asked
        there = ", ".join(known[:NAMED_MODELS]) + ("…" if len(known) > NAMED_MODELS else "")
        raise ModelNotFound(
            f"there is no model {asked!r}; there is {there or 'none yet'}. A new one is named by its folder, or as {FORMS}"
        )

    def source(
        self, asked: str, *, name: str | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """Register a source; the model as the admin API tells it.

        One that has the name already, and comes from there, is left as it is.

        Args:
            asked: A folder or a URI.
            name: What it is to be called; None: a name that follows from it.
            revision: Of a hub.

        Raises:
            PilotlightError: it will not do, or may not be copied.
        """
        uri = uri_of(asked, elsewhere=self.elsewhere)
        called = _checked(name or name_of(uri))
        there = self.client.get(f"/models/{called}") if called in self.known() else None
        if there is not None and revision is None and self._is_of(there, uri):
            return there
        slo = {"ttft_ms": DEFAULT_TTFT_MS, "tpot_ms": DEFAULT_TPOT_MS}
        body = {"name": called, "uri": uri, "slo": slo}
        try:
            return self.client.post(
                "/models", body if revision is None else {**body, "revision": revision}
            )
        except UriNotAllowed:
            if self.elsewhere:
                raise
        folder = self.home.models / called
        if there is not None and there["uri"] != folder.as_uri():
            raise AlreadyExists(
                f"{called} is registered, from {there['uri']}: give the new one another name with --name"
            )
        self._copy_to(folder, uri, revision, called)
        return there or self.client.post("/models", {**body, "uri": folder.as_uri()})

    def _is_of(self, model: Mapping[str, Any], uri: str) -> bool:
        """Whether a registered model comes from there, or is a copy of it. Of a hub without a
        revision any commit is.
        """
        folder = self.home.models / model["name"]
        copied = not self.elsewhere and model["uri"] == folder.as_uri()
        origin = (source_of(folder) if copied else None) or model["uri"]
        return origin == uri or ("@" not in uri and origin.startswith(f"{uri}@"))

    def _copy_to(self, folder: Path, uri: str, revision: str | None, name: str) -> None:
        """Make a copy after a question, unless it is there."""
        parsed = parse_uri(uri)
        if isinstance(parsed, FolderUri):
            original = parsed.path
            with closing(FolderSource(original)) as source:
                contents = contents_of(source, uri)
            if not is_copy(folder, uri):
                self._consent(contents, f"{original}", folder, "Put it there?")
                link(original, contents, folder)
            return
        given: dict[str, Any] = {
            "model_roots": _root(parsed),
            "secrets_dir": self.home.secrets_of("loader"),
        }
        settings = ModelRootsSettings(**given)
        try:
            pinned = Sources(settings, PATIENCE).pin(uri, revision)
        except CheckpointError as error:
            found = error_of(error.code, str(error))
            if isinstance(found, SourceUnavailable):
                found = type(found)(
                    f"{found.message}. Without a way to it, name a folder that holds the model"
                )
            raise found from error
        with closing(pinned.source) as source:
            contents = contents_of(source, pinned.uri)
            if not is_copy(folder, pinned.uri):
                place = settings.hub_endpoint if isinstance(parsed, HubUri) else "its bucket"
                self._consent(contents, place, folder, "Download it?")
                with self._bar(contents, name) as progress:
                    task = progress.add_task(escape(name), total=contents.size_bytes)
                    copy(source, contents, folder, lambda n: progress.advance(task, n))

    def _consent(self, contents: Contents, place: str, folder: Path, question: str) -> None:
        told = (
            f"{contents.uri}\n  {contents.architecture}, {contents.size_bytes / MIB:,.1f} MiB in {len(contents.files)} files, "
            f"from {place}\n  would be kept in {folder}, where this system may read it. Its license says what it may be used for."
        )
        if not self.ask(told, question):
            raise BadRequest("nothing was fetched, as you wished")

    def _bar(self, contents: Contents, name: str) -> Progress:
        return Progress(
            TextColumn(f"fetching {escape(name)}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=errors,
            transient=True,
            disable=self.quiet or not errors.is_terminal or not contents.size_bytes,
        )


def is_source(asked: str) -> bool:
    """Whether this names a place rather than a model."""
    return "://" in asked or asked.startswith((".", "/", "~")) or Path(asked).is_dir()


def name_of(uri: str) -> str:
    """What a model is called that was given no name: ``org/name`` of a hub, else the last part of
    its path.
    """
    parsed = parse_uri(uri)
    if isinstance(parsed, HubUri):
        return parsed.repository
    last = (
        parsed.path.name
        if isinstance(parsed, FolderUri)
        else (parsed.prefix or (parsed.bucket,))[-1]
    )
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")


def asker(*, yes: bool, as_json: bool) -> Ask:
    """Asks at the terminal; with ``yes`` it is agreed to all.

    Where there is no terminal, the question raises ``UnprocessableInput``.
    """

    def ask(told: str, question: str) -> bool:
        if yes:
            return True
        if as_json or not sys.stdin.isatty():
            raise UnprocessableInput(
                f"{' '.join(told.split())} There is no terminal to ask at: --yes agrees to it"
            )
        errors.print(told, markup=False, soft_wrap=True)
        answer = errors.input(f"{question} [y/N] ", markup=False)
        return answer.strip().lower() in ("y", "yes")

    return ask


def _checked(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or NAME.fullmatch(name) is None:
        raise UnprocessableInput(
            f"{name!r} is no name for a model: letters, digits, `.`, `_`, `-`, and `/` between parts; give one with --name"
        )
    return name


def _root(uri: HubUri | S3Uri) -> str:
    """The place itself as the only root: what is read was named, and agreed to."""
    return f"hf://{uri.repository}" if isinstance(uri, HubUri) else str(uri)
