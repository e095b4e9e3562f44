"""The engine child's process: ``python -m pilotlight.worker.engine_main --fd N``.

What its first start needs of the driver begins here, in threads of the native library, before
anything else is imported: as it was planned by the process before this one.

::

    library   [ driver, context )[ arena, memory )[ kernels, graphs ...     [ host pool pinned ...
    Python    [ imports ................................ )[ device: attaches )[ up
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pilotlight.common.machine import gpus_shown
from pilotlight.native.plan import BadPlan, taken_plan
from pilotlight.native.starting import Begun

START, SPARE = "--start", "--spare"


def begun(arguments: Sequence[str]) -> Begun | None:
    """What the library does by itself from now on. None: nothing is planned; or a spare is not to
    have anything of the device; or which GPU is this process's own is not known yet; or nothing can
    be begun, and whoever does all of it says why.
    """
    if START not in arguments[:-1] or SPARE in arguments:
        return None
    if gpus_shown(os.environ.get("CUDA_VISIBLE_DEVICES")) != 1:
        return None
    # As torch has it, which sets this before it opens a device.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    try:
        plan = taken_plan(Path(arguments[arguments.index(START) + 1]))
        return Begun(plan) if plan is not None else None
    except (BadPlan, OSError, AttributeError) as error:
        sys.stderr.write(f"nothing is begun before its time: {error}\n")
        return None


def main(arguments: Sequence[str]) -> int:
    """Begin, and be the engine; the exit status."""
    ahead = begun(arguments)
    # Here and not above: it takes a tenth of a second.
    from pilotlight.worker.engine_child import child

    return child.main(arguments, ahead)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
