"""``python -m pilotlight.worker``: see ``running``. Its engine's process begins before all else is
imported, which takes as long as a good part of the engine's own imports.
"""

import sys

from pilotlight.worker.engines.child_ahead import engine_ahead

AHEAD = "--ahead"


def _main() -> int:
    arguments = sys.argv[1:]
    ahead = engine_ahead() if arguments in ([], [AHEAD]) else None
    from pilotlight.worker.running import run

    return run(arguments, ahead)


sys.exit(_main())
