"""An engine child that writes down what it has imported: ``python -m counted_child`` in place of
``pilotlight.worker.engine_child.child``.

A line of JSON when it is up, and one when it ends, into the file that ``COUNTED_MODULES`` names.
"""

import json
import os
import sys
from pathlib import Path

from pilotlight.common.messages.engine import EngineUp
from pilotlight.worker.engine_child import child

FILE = "COUNTED_MODULES"


class CountedLoop(child.ChildLoop):
    """The loop, which begins when the engine is up."""

    def run(self, up: EngineUp) -> None:
        note()
        super().run(up)


def note() -> None:
    with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(sorted(sys.modules)) + "\n")


if __name__ == "__main__":
    child.ChildLoop = CountedLoop
    status = child.main(sys.argv[1:])
    note()
    sys.exit(status)
