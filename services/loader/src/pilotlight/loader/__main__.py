"""``python -m pilotlight.loader``. Its workers, and on a new node the proof that torch opens a GPU,
begin before anything else is imported.
"""

import os
import sys
from functools import partial

from pilotlight.loader.opening_ahead import OpeningAhead
from pilotlight.loader.workers_ahead import WorkersAhead


def _main() -> int:
    ahead, opening = WorkersAhead.of(os.environ), OpeningAhead.of(os.environ)
    import pilotlight.common.plain_logs  # noqa: F401 # pyright: ignore[reportUnusedImport] - before structlog
    from pilotlight.common.service import run_service
    from pilotlight.loader.app import build
    from pilotlight.loader.settings import LoaderSettings

    return run_service("loader", LoaderSettings, partial(build, ahead=ahead, opening=opening))


if __name__ == "__main__":
    sys.exit(_main())
