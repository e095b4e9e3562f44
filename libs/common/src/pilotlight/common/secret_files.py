"""Secrets in files of their own, one folder for each service."""

from pathlib import Path


def read_secret(folder: Path | None, name: str) -> str | None:
    """A secret from its file, without the newline at its end; None where there is no such file."""
    if folder is None:
        return None
    path = folder / name
    return path.read_text().strip() if path.is_file() else None
