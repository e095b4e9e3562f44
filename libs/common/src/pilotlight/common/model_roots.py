"""Which places models may come from: ``PILOTLIGHT_MODEL_ROOTS``, checked by the gateway at registration and by every loader again."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import Field

from pilotlight.common.errors import SourceUnavailable, UriNotAllowed
from pilotlight.common.settings import PilotlightSettings

MAX_URI_CHARS = 2048


class ModelRootsSettings(PilotlightSettings):
    """Where models may lie."""

    model_roots: str = Field(
        ".pilotlight/models",
        description="Folders below which models may be registered, separated by commas. Nothing else is ever read.",
    )

    def roots(self) -> "ModelRoots":
        """The roots, made absolute."""
        return ModelRoots.parse(self.model_roots)


@dataclass(frozen=True, slots=True)
class ModelRoots:
    """Allowed folders, with symbolic links resolved."""

    folders: tuple[Path, ...]

    @classmethod
    def parse(cls, text: str) -> "ModelRoots":
        """From a comma-separated list."""
        return cls(tuple(Path(part.strip()).expanduser().resolve() for part in text.split(",") if part.strip()))

    def folder_of(self, uri: str) -> Path:
        """The folder that a model's URI names: ``file:///folder`` or an absolute path.

        Raises:
            UriNotAllowed: another scheme, or a folder that lies (after links and dots are resolved) below no root.
            SourceUnavailable: there is no such folder.
        """
        if len(uri) > MAX_URI_CHARS or "\0" in unquote(uri):
            raise UriNotAllowed(f"a model URI has at most {MAX_URI_CHARS} characters and no NUL", param="uri")
        try:
            parts = urlsplit(uri)
        except ValueError as error:
            raise UriNotAllowed(f"{uri!r} is not a URI: {error}", param="uri") from error
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            path = Path(unquote(parts.path))
        elif parts.scheme == "" and uri.startswith("/"):
            path = Path(uri)
        else:
            raise UriNotAllowed(f"{uri!r}: give an absolute folder, as file:///folder", param="uri")
        # Path.resolve() raises for links that lead in a circle, and until Python 3.13 it is a RuntimeError.
        resolved = Path(os.path.realpath(path))
        if not self.hold(resolved):
            allowed = ", ".join(str(folder) for folder in self.folders) or "none"
            raise UriNotAllowed(f"{resolved} is not below an allowed root (PILOTLIGHT_MODEL_ROOTS: {allowed})", param="uri")
        try:
            resolved.stat()
        except OSError as error:
            raise SourceUnavailable(f"there is no folder {resolved}: {error.strerror}", param="uri") from error
        if not resolved.is_dir():
            raise SourceUnavailable(f"{resolved} is not a folder", param="uri")
        return resolved

    def hold(self, resolved: Path) -> bool:
        """Whether a path, its links and dots resolved, lies below a root."""
        return any(resolved.is_relative_to(folder) for folder in self.folders)
