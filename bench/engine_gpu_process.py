"""An engine as a process, and whose the device's memory is."""

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

STOP_S = 20.0
POLL_S = 0.02


class Child:
    """One engine that is asked things, one at a time."""

    def __init__(self, name: str, command: list[str], start_s: float, answer_s: float) -> None:
        """Starts it and waits until it is ready.

        Raises:
            SystemExit: it ended, or did not get ready in time; its own words are on stderr.
        """
        self._name = name
        self._answer_s = answer_s
        # Our own sources are nothing for another interpreter.
        variables = {
            key: value for key, value in os.environ.items() if name == "ours" or key != "PYTHONPATH"
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.about: dict[str, Any] = self._next(start_s)
        except SystemExit:
            self._stop()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self, deadline_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise SystemExit(f"{self._name} did not answer within {deadline_s:g} s") from None
        if not line:
            raise SystemExit(f"{self._name} ended with {self._process.wait(STOP_S)}")
        return json.loads(line)

    def ask(self, **what: Any) -> dict[str, Any]:
        """Its answer.

        Raises:
            SystemExit: it gave none.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self._next(self._answer_s)

    def generate(
        self,
        seed: int,
        prompt_tokens: list[int],
        output_tokens: list[int],
        at_once: int | None = None,
    ) -> float:
        """Seconds from the first request's start to the last one's end; see ``Generate``."""
        asked = {"seed": seed, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        return float(self.ask(do="generate", at_once=at_once, **asked)["seconds"])

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def used_bytes_of_device() -> Callable[[], int]:
    """What asks the driver how much memory is in use of the first device that this process is
    shown, by NVIDIA's management library, which knows all of the host.
    """
    import pynvml

    pynvml.nvmlInit()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    device = (
        pynvml.nvmlDeviceGetHandleByIndex(int(shown))
        if shown.isdecimal()
        else pynvml.nvmlDeviceGetHandleByUUID(shown)
    )
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(device).used)


class DeviceMemory:
    """Which engine has the device's memory: it grows for the one whose turn it is, since one works
    at a time.
    """

    def __init__(self, used_bytes: Callable[[], int] | None = None) -> None:
        self._used_bytes = used_bytes or used_bytes_of_device()
        self._bytes: dict[str, int] = defaultdict(int)
        self.peak_bytes: dict[str, int] = defaultdict(int)
        """The most that each engine had at any time, its context included."""

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Within it, it is this engine's turn."""
        before, ended, most = self._used_bytes(), threading.Event(), [0]

        def watch() -> None:
            while not ended.wait(POLL_S):
                most[0] = max(most[0], self._used_bytes())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(STOP_S)
            after = self._used_bytes()
            self.peak_bytes[name] = max(
                self.peak_bytes[name], self._bytes[name] + max(most[0], after) - before
            )
            self._bytes[name] += after - before
