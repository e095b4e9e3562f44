"""An engine child that says, as a spare, that it has opened its device: what importing an engine
must never do.
"""

import sys

from pilotlight.worker.engine_child import child


def opened() -> bool:
    return True


if __name__ == "__main__":
    child._device_open = opened
    sys.exit(child.main(sys.argv[1:]))
