"""What every service shares: bus, database, object store, settings, errors, telemetry."""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    # structlog loads rich where it is installed, to paint logs for people: 80 modules, none of
    # which a service or an engine uses, and a cold process's first token waits for all imports.
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType]
    import structlog as structlog

    del sys.modules["rich"]
