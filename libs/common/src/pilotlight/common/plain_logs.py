"""Imported first in a process that a cold start waits for: keeps rich away from structlog, which
loads it where it is installed, to paint logs for people. It is 80 modules, which no service uses.
"""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType] - an import of it fails
    import structlog as structlog

    del sys.modules["rich"]
