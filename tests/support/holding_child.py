"""An engine child whose socket outlives it: as of one that is stuck in a driver, its death alone
tells nothing.

``HOLDING_PID_FILE`` names a file for the id of the process that holds the socket; the test that
starts this ends that.
"""

import os
import subprocess
import sys
from pathlib import Path

from pilotlight.worker.engine_child import child

if __name__ == "__main__":
    descriptor = int(sys.argv[sys.argv.index("--fd") + 1])
    holder = subprocess.Popen(["sleep", "300"], pass_fds=(descriptor,), start_new_session=True)
    Path(os.environ["HOLDING_PID_FILE"]).write_text(str(holder.pid))
    sys.exit(child.main(sys.argv[1:]))
