"""What comes with Pilotlight beside its code: ``migrations``, ``models`` (the demo model) and
``docs``.

A checkout has them as folders of its root. An installation (the offline archive, an image) has them
in ``share/pilotlight`` of the environment that the code is installed in.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve()


def shipped_folder(name: str, *, code: Path = _HERE, prefix: Path | None = None) -> Path:
    """Where a folder that comes with Pilotlight lies, whether it is there or not.

    ``code`` is this file and ``prefix`` the environment's folder, when asked for another
    installation than the one that runs.
    """
    root = code.parents[5] if len(code.parents) > 5 else None
    if root is not None and code.is_relative_to(root / "libs" / "common" / "src"):
        return root / name
    return (prefix or Path(sys.prefix)) / "share" / "pilotlight" / name
