"""An engine child that hangs or fails at its start: ``python -m unready_child`` in the place of
``pilotlight.worker.engine_child.child``.

``UNREADY_DIR`` names a folder. A child that opens its device leaves a file there, called by its
process id, and hangs then if there is one called ``hang``. ``UNREADY_AT`` names what fails instead,
``open_device`` or ``warm_up``, as on a device whose context is lost: the orderly end of such a
process never comes.
"""

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from pilotlight.worker.engine_child import child
from pilotlight.worker.engine_child import device as child_device
from pilotlight.worker.engine_child import warmup as child_warmup

open_device = child_device.open_device


def open_slowly(*arguments: Any, **settings: Any) -> Any:
    folder = Path(os.environ["UNREADY_DIR"])
    (folder / str(os.getpid())).touch()
    if (folder / "hang").exists():
        threading.Event().wait()
    return open_device(*arguments, **settings)


def fail(*arguments: Any, **settings: Any) -> NoReturn:
    atexit.register(threading.Event().wait)
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


if __name__ == "__main__":
    child_device.open_device = (
        fail if os.environ.get("UNREADY_AT") == "open_device" else open_slowly
    )
    if os.environ.get("UNREADY_AT") == "warm_up":
        child_warmup.warm_up = fail
    sys.exit(child.main(sys.argv[1:]))
