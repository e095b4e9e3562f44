"""Which code this is: a name for it that changes when the code does."""

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable


@cache
def release_of(package: str) -> str:
    """The release of ``pilotlight.PACKAGE``, and a digest of its sources."""
    digest = hashlib.blake2b(digest_size=6)
    for name, text in sorted(_sources(files(f"pilotlight.{package}"), "")):
        digest.update(name.encode())
        digest.update(text)
    return f"{version(f'pilotlight-{package}')}+{digest.hexdigest()}"


def _sources(folder: Traversable, within: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for one in folder.iterdir():
        name = f"{within}/{one.name}"
        if one.is_dir():
            found += _sources(one, name)
        elif one.name.endswith(".py"):
            found.append((name, one.read_bytes()))
    return found
