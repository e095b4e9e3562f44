"""``python -m pilotlight.loader``. Its workers begin before anything else is imported."""

import os
import sys
from functools import partial

from pilotlight.loader.workers_ahead import WorkersAhead


def _main() -> int:
    ahead = WorkersAhead.of(os.environ)
    import pilotlight.common.plain_logs  # noqa: F401 # pyright: ignore[reportUnusedImport] - before structlog
    from pilotlight.common.service import run_service
    from pilotlight.loader.app import build
    from pilotlight.loader.settings import LoaderSettings

    return run_service("loader", LoaderSettings, partial(build, ahead=ahead))


if __name__ == "__main__":
    sys.exit(_main())
