"""What runs in the engine's own process: one engine behind a socket, its device, its stages, its
loop.
"""

# Before structlog, of which it keeps something away.
import pilotlight.common  # noqa: F401 # pyright: ignore[reportUnusedImport]
