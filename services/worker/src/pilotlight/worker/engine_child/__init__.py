"""What runs in the engine's own process: one engine behind a socket, its device, its stages, its
loop.
"""

import pilotlight.common.plain_logs  # noqa: F401 # pyright: ignore[reportUnusedImport] - before structlog
