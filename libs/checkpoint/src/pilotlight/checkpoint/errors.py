"""What can be wrong with a checkpoint or its source.

::

    CheckpointError
    ├── BadCheckpoint        incomplete or damaged: export or download it again
    ├── UnsupportedModel     sound, but of a kind that cannot be served
    ├── UriNotAllowed        a file lies where nothing may be read
    ├── SourceUnavailable    the files cannot be read
    │   ├── SourceMissing    there is no such source
    │   └── SourceDenied     the server that has the files refuses to give them
    └── SourceChanged        the files are no longer those that were listed

This library lies below ``pilotlight.common`` and so has a tree of its own. Each ``code`` is that of
the class of the same name in ``pilotlight.common.errors``: what maps one to the other needs no
table.
"""

from typing import ClassVar


class CheckpointError(Exception):
    """Something is wrong with a checkpoint. ``str()`` names the file, where one is at fault."""

    code: ClassVar[str]

    def __init__(self, message: str, *, file: str | None = None) -> None:
        self.file = file
        super().__init__(message if file is None else f"{quote(file)}: {message}")


class BadCheckpoint(CheckpointError):
    """The checkpoint is incomplete or damaged."""

    code = "bad_checkpoint"


class UnsupportedModel(CheckpointError):
    """This kind of model cannot be served."""

    code = "unsupported_model"


class UriNotAllowed(CheckpointError):
    """A file of the checkpoint lies outside of what may be read."""

    code = "uri_not_allowed"


class SourceUnavailable(CheckpointError):
    """The checkpoint's files cannot be read."""

    code = "source_unavailable"


class SourceMissing(SourceUnavailable):
    """There is no such checkpoint."""

    code = "source_missing"


class SourceDenied(SourceUnavailable):
    """The server that has the checkpoint's files refuses to give them."""

    code = "source_denied"


class SourceChanged(CheckpointError):
    """The checkpoint's files are not those that were listed."""

    code = "source_changed"


def quote(name: str) -> str:
    """A name from a foreign file, fit for a message: short, on one line, without control characters
    or lone surrogates.
    """
    shown = name if len(name) <= 120 else f"{name[:117]}..."
    return shown if shown.isprintable() else ascii(shown)


def quote_some(names: list[str], limit: int = 3) -> str:
    """The first few of many foreign names, and how many there are."""
    shown = ", ".join(quote(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
