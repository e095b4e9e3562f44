"""Where threads are while a start goes on, looked at every millisecond, for a run that is to
explain where the time goes and gives no figures; and when a start's graphs were ready and ran.
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from pilotlight.engine.cuda.graph_device import ArchiveOnDevice
from pilotlight.engine.device.memory import StageMemory
from pilotlight.policy.graphs.restoring import PROMPTS

EVERY_S, SWITCH_S = 0.001, 0.0002
"""Between two looks; and for how long a thread keeps Python's lock while others want it."""
OWN = tuple(f"/pilotlight/{part}/" for part in ("engine", "native", "worker"))
TOLD = 40


class Where:
    """Within it, the places of all threads are counted."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._seconds = defaultdict[tuple[str, str], float](float)
        self._thread = threading.Thread(target=self._look, name="where", daemon=True)

    def __enter__(self) -> Self:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def told(self) -> str:
        """Milliseconds by thread and place, the most first."""
        most = sorted(self._seconds.items(), key=lambda one: -one[1])[:TOLD]
        return "\n".join(
            f"{1e3 * seconds:8.1f} ms  {thread:10}  {place}" for (thread, place), seconds in most
        )

    def _look(self) -> None:
        last_s = time.perf_counter()
        while not self._over.wait(EVERY_S):
            now_s = time.perf_counter()
            names = {
                one.ident: one.name for one in threading.enumerate() if one is not self._thread
            }
            for ident, frame in sys._current_frames().items():
                if ident in names:
                    self._seconds[names[ident] or "", place_of(frame)] += now_s - last_s
            last_s = now_s


def place_of(frame: FrameType | None) -> str:
    """The innermost line of ours, and the innermost of all."""
    innermost = frame
    while frame is not None and not any(own in frame.f_code.co_filename for own in OWN):
        frame = frame.f_back
    said = [_line(one) for one in (frame, innermost) if one is not None]
    return " > ".join(dict.fromkeys(said))


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"


class Noted(ArchiveOnDevice):
    """Notes when graphs were ready, and when they were run."""

    def __init__(self, moments: dict[str, float], memory: StageMemory, archive: bytes) -> None:
        super().__init__(memory, archive)
        self._moments = moments

    def build(self, size: int, between: Callable[[], None]) -> None:
        """See ``GraphDevice``."""
        super().build(size, between)
        self._note("ready", size)

    def launch(self, size: int) -> None:
        """See ``GraphDevice``: the first time for its trial."""
        tried = f"{named(size)}_trial" in self._moments
        self._note("run" if tried else "trial", size)
        super().launch(size)

    def _note(self, what: str, size: int) -> None:
        self._moments.setdefault(f"{named(size)}_{what}", time.perf_counter())


def named(size: int) -> str:
    """A graph, as figures call it."""
    return f"prompt{size - PROMPTS}" if size > PROMPTS else f"decode{size}"
