"""The proof that torch opens a GPU, which a new node wants before it plans its workers. It is begun
before the loader itself has imported anything, and does not import torch, which takes seconds: the
library through which torch reaches CUDA says how many GPUs it sees, as ``torch.cuda.init`` asks it.

Imports nothing that takes time. Only its success counts. In any other case the proof is done as if
there had been none ahead, by torch itself, and that tells why.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pilotlight.common.machine import DEVICES
from pilotlight.loader.spawning import spawn
from pilotlight.loader.workers_ahead import guessed, inherited, state_dir_of

OPEN = "import torch; torch.cuda.init()"
_OPEN_WITHOUT_TORCH = """
import ctypes, importlib.util, os
torch = os.path.dirname(importlib.util.find_spec("torch").origin)
# The runtime is the one that this library names, wherever torch's packages have put it.
cuda = ctypes.CDLL(os.path.join(torch, "lib", "libc10_cuda.so"))
count = ctypes.c_int()
assert cuda.cudaGetDeviceCount(ctypes.byref(count)) == 0 and count.value
"""
_END_WITH_LOADER = "import ctypes; ctypes.CDLL(None).prctl(1, 9)"
"""``PR_SET_PDEATHSIG``, ``SIGKILL``: where the driver hangs, each loader would leave one behind."""
COMMAND = (sys.executable, "-c", f"{_END_WITH_LOADER}\n{_OPEN_WITHOUT_TORCH}")


def record_path_of(state_dir: Path) -> Path:
    """The file that tells what an earlier run found of the node's GPUs."""
    return state_dir / "gpus.json"


class OpeningAhead:
    """A process in which what torch brings opens a GPU; or none, which has opened none."""

    def __init__(self) -> None:
        """None."""
        self._lock = threading.Lock()
        self._pid: int | None = None
        """Of a process that has not been reaped."""
        self._exit_code: int | None = None
        self._reaper: threading.Thread | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str], devices: Path = DEVICES) -> "OpeningAhead":
        """One, where these variables and this machine's devices call for workers on GPUs and no
        earlier run has kept what it found; none, where that cannot be.

        Args:
            environment: the loader's.
            devices: the folder with a file for each device of the machine.
        """
        made = cls()
        # A setting that is no number is the loader's to tell of.
        with suppress(OSError, ValueError):
            kind, _ = guessed(environment, devices)
            if kind == "cuda" and not record_path_of(state_dir_of(environment)).exists():
                made.begin(environment)
        return made

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the process. It sees the GPUs that we are shown: which of them are well is not
        known yet.

        Args:
            environment: the loader's.

        Raises:
            OSError: it cannot be started.
        """
        variables = inherited(environment) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        pid = self._pid = spawn(COMMAND, variables, Path(os.devnull))
        # Of its own, so that no zombie is left where nobody asks, and no exit waits for it.
        self._reaper = threading.Thread(
            target=self._reap, args=(pid,), name="opening ahead", daemon=True
        )
        self._reaper.start()

    def opened(self, deadline_s: float) -> bool:
        """Whether it has opened a GPU; blocks until that is known. A process that takes longer
        is killed, and left to itself if it does not end by that.

        Args:
            deadline_s: how long to wait, in seconds.
        """
        if self._reaper is not None:
            self._reaper.join(deadline_s)
        self.give_up()
        return self._exit_code == 0

    def give_up(self) -> None:
        """Nobody asks any more: kill it, if it still runs."""
        with self._lock:
            if self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)

    def _reap(self, pid: int) -> None:
        # Reaped under the lock alone: after that the id may be another process's.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._pid = None
            # Where SIGCHLD is ignored, as a parent of ours may have it, no status is kept.
            with suppress(ChildProcessError):
                self._exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
