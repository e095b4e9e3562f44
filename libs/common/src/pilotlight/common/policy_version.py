"""Which code decides: a name for it that changes when the code does."""

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable


@cache
def policy_version() -> str:
    """The release, and a digest of the sources of ``pilotlight.policy``: decisions of one version
    can be replayed by that version.
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, text in sorted(_sources(files("pilotlight.policy"), "")):
        digest.update(name.encode())
        digest.update(text)
    return f"{version('pilotlight-policy')}+{digest.hexdigest()}"


def _sources(folder: Traversable, within: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for one in folder.iterdir():
        name = f"{within}/{one.name}"
        if one.is_dir():
            found += _sources(one, name)
        elif one.name.endswith(".py"):
            found.append((name, one.read_bytes()))
    return found
