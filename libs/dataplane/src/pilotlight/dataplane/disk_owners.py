"""Whose the chunks of a disk tier are, from one loader to the next.

::

    DIR/models/<digest of a model>    a line for each chunk that was stored for it; what is torn or gone is passed over

Files are appended to while chunks are stored, and written anew when the tier is opened. A line that
is missing costs that chunk its importance, nothing else.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

from pilotlight.policy.ids import Digest

FOLDER = "models"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def note_owner(folder: Path, chunk: Digest, model: Digest) -> None:
    """Write down whose a chunk is.

    Raises:
        OSError: the disk cannot be written to.
    """
    if not _DIGEST.fullmatch(model):
        return
    path = folder / FOLDER / model
    path.parent.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, f"{chunk}\n".encode())
    finally:
        os.close(descriptor)


def read_owners(folder: Path, chunks: Collection[Digest]) -> dict[Digest, Digest]:
    """Whose these chunks are, as far as it is known; only lines about them are kept.

    Raises:
        OSError: the disk cannot be read or written to.
    """
    owners: dict[Digest, Digest] = {}
    below = folder / FOLDER
    if below.is_symlink() or not below.is_dir():
        return owners
    for path in sorted(below.iterdir()):
        if not _DIGEST.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            continue
        lines = path.read_text(errors="replace").splitlines()
        known = dict.fromkeys(Digest(line) for line in lines if line in chunks)
        if not known:
            path.unlink()
            continue
        owners |= dict.fromkeys(known, Digest(path.name))
        if len(known) < len(lines):
            path.write_text("".join(f"{chunk}\n" for chunk in known))
    return owners
