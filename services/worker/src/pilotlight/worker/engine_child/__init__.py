"""What runs in the engine's own process: one engine behind a socket, its device, its stages, its
loop.
"""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    # structlog loads rich where it is installed, to paint logs for people: 80 modules, none of
    # which this process uses, and a cold engine's first tokens wait for its imports.
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType]
    import structlog as structlog

    del sys.modules["rich"]
