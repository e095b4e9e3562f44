"""Workers that are started before the loader itself has imported anything: their engines' imports
are most of what a cold machine's first token waits for.

::

    loader   [ imports ............ )[ pool, devices )[ plan: to each worker what it is
    worker     [ imports ........................ waits )[ device, bus )[ wants its engine
    engine       [ imports .................................................... waits )[ device, up

Such a worker is told at its standard input what it is. It ends when this loader does before it has
been told, or closes that without a word. It speaks with nobody before, and opens no device; only
its engine makes the context of a GPU that is the only one.

Imports nothing that takes time. What variables say is a guess, which settings and devices have the
last word on: a worker whose guess was wrong starts its engine again.
"""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pilotlight.common.errors import PilotlightError
from pilotlight.common.ids import worker_id_of
from pilotlight.common.machine import DEVICES, END_WITH_PARENT, gpus_shown, log_file
from pilotlight.common.procfs import look_at
from pilotlight.loader.identity import node_id_of
from pilotlight.loader.spawning import spawn
from pilotlight.policy.ids import WorkerId

NOT_FOR_WORKERS = ("NOTIFY_SOCKET", "HF_", "HUGGING_FACE_")
"""Of our environment: our supervisor, and the hub's token. Workers read from no hub."""
STATE_DIR, LOG_DIR = ".pilotlight/state", ".pilotlight/logs"
"""As the settings have them, which import pydantic."""
COMMAND = (sys.executable, "-m", "pilotlight.worker")
MOST_AHEAD = 16
"""As many GPUs as a host has. More workers are simulations, or share its cores: their imports would
keep each other waiting."""


def log_of(log_dir: Path, index: int) -> Path:
    """The file that a worker writes to."""
    return log_file(log_dir, f"worker-{index}.log")


def pid_path_of(state_dir: Path, index: int) -> Path:
    """The file that tells which process a worker is."""
    return state_dir / "workers" / f"{index}.json"


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker has of its loader's variables."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(NOT_FOR_WORKERS) and name != END_WITH_PARENT
    }


@dataclass(frozen=True, slots=True)
class _Ahead:
    pid: int
    telling: int
    """Descriptor of its standard input."""
    environment: Mapping[str, str]


class WorkersAhead:
    """Workers that have begun, and do not know yet what they are."""

    def __init__(self) -> None:
        """None."""
        self._begun: dict[WorkerId, _Ahead] = {}

    @classmethod
    def of(cls, environment: Mapping[str, str], devices: Path = DEVICES) -> "WorkersAhead":
        """Those that these variables and this machine's devices call for; none, where that cannot
        be: who wants them then starts them, and says why it cannot.

        Args:
            environment: the loader's.
            devices: the folder with a file for each device of the machine.
        """
        made = cls()
        state_dir = state_dir_of(environment)
        log_dir = Path(environment.get("PILOTLIGHT_LOG_DIR", LOG_DIR))
        # A setting that is no number is the loader's to tell of.
        with suppress(OSError, ValueError, PilotlightError):
            kind, count = guessed(environment, devices)
            if not count:
                return made
            node_id = node_id_of(state_dir)
            for index in range(min(count, MOST_AHEAD)):
                # One that an earlier loader has left is taken over.
                if not _lives(pid_path_of(state_dir, index)):
                    worker_id = worker_id_of(node_id, index)
                    variables = inherited(environment) | {
                        "PILOTLIGHT_WORKER_ID": worker_id,
                        "PILOTLIGHT_NODE_ID": node_id,
                        "PILOTLIGHT_DEVICE": kind,
                        "PILOTLIGHT_WORKERS": str(count),
                    }
                    made.begin(worker_id, variables, log_of(log_dir, index))
        return made

    def begin(self, worker_id: WorkerId, variables: Mapping[str, str], log_path: Path) -> None:
        """Start one.

        Args:
            worker_id: its name.
            variables: what is guessed of what it is.
            log_path: where its output goes.

        Raises:
            OSError: it cannot be started.
        """
        listening, telling = os.pipe()
        try:
            pid = spawn((*COMMAND, "--ahead"), variables, log_path, listening)
        except OSError:
            os.close(telling)
            raise
        finally:
            os.close(listening)
        self._begun[worker_id] = _Ahead(pid, telling, variables)

    @property
    def names(self) -> frozenset[WorkerId]:
        """Of those that nobody has taken."""
        return frozenset(self._begun)

    def take(self, worker_id: WorkerId, environment: Mapping[str, str]) -> int | None:
        """Tell one what it is; its process id. None: there is none, or it has ended.

        Args:
            worker_id: its name.
            environment: all of its variables.
        """
        ahead = self._begun.get(worker_id)
        if ahead is None or ahead.environment.keys() - environment.keys():
            return None
        told = {
            name: value
            for name, value in environment.items()
            if ahead.environment.get(name) != value
        }
        # Some paths and ids, less than what a pipe takes at once. One that has ended since is found
        # as any other worker's end.
        try:
            os.write(ahead.telling, json.dumps(told).encode())
        except BrokenPipeError:
            return None
        del self._begun[worker_id]
        os.close(ahead.telling)
        return ahead.pid

    def give_up(self, worker_id: WorkerId) -> int | None:
        """Nobody wants it: it ends by itself. Its process id, for who waits for its end."""
        ahead = self._begun.pop(worker_id, None)
        if ahead is None:
            return None
        os.close(ahead.telling)
        return ahead.pid


def state_dir_of(environment: Mapping[str, str]) -> Path:
    """The loader's state folder, by its variables."""
    return Path(environment.get("PILOTLIGHT_STATE_DIR", STATE_DIR))


def guessed(environment: Mapping[str, str], devices: Path) -> tuple[str, int]:
    """The kind of the node's workers, and how many there will be; what the settings do not say is
    found by looking.

    Args:
        environment: the loader's.
        devices: the folder with a file for each device of the machine.

    Raises:
        ValueError: the number that is asked for is none.
    """
    kind = environment.get("PILOTLIGHT_WORKER_KIND", "") or "auto"
    asked = environment.get("PILOTLIGHT_WORKERS", "")
    if kind == "sim":
        return kind, 0
    gpus = 0 if kind == "cpu" else gpus_shown(environment.get("CUDA_VISIBLE_DEVICES"), devices)
    count = int(asked) if asked else max(1, gpus)
    return "cuda" if kind == "cuda" or 0 < count <= gpus else "cpu", count


def _lives(pid_path: Path) -> bool:
    """Whether an earlier loader's worker is still there."""
    try:
        record = json.loads(pid_path.read_bytes())
        found = look_at(record["pid"])
        return found is not None and found.start_ticks == record["start_ticks"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
