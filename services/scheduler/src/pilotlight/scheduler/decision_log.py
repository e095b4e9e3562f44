"""Writes the decision log of a term (``common.decision_log``), beside the ticks.

A tick leaves references behind. Between ticks changes are made of them (``squeeze``), and a thread
writes: a thread that made the changes would have the interpreter for 5 ms at a time, mostly in the
midst of a tick. The first tick of a file, which is all that there is, is the thread's. A log that
cannot keep up, or cannot be written, is given up and begun anew: decisions do not wait for it.
"""

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from pilotlight.common.clock import Clock
from pilotlight.common.decision_log import (
    FORMAT,
    SUFFIX,
    Header,
    LogWriter,
    Noted,
    noted,
)
from pilotlight.common.decision_rules import rules_change
from pilotlight.common.policy_version import policy_version
from pilotlight.common.waiting import every
from pilotlight.policy.control.plan import ControlFacts, ControlRules, Memory, Plan
from pilotlight.policy.ids import Epoch

log = structlog.get_logger()

WRITE_S = 1.0
"""Ticks are written in turns: what is written together is squeezed better."""
MAX_WAITING = 2000
"""Ticks that wait to be written, at most."""


@dataclass(slots=True, kw_only=True)
class DecisionLog:
    """The files of one term."""

    folder: Path | None
    """None: no log is kept."""
    file_bytes: int
    """A file that is longer is ended, and another one begun."""
    keep_bytes: int
    """Of all files together; the oldest go."""
    epoch: Epoch
    rules: ControlRules
    clock: Clock
    _waiting: deque[Noted] = field(default_factory=deque["Noted"])
    _writer: LogWriter | None = None
    _files: int = 0
    _ticks: int = 0
    """Noted for this file."""
    _begins: bool = True
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _is_appending: bool = False
    """A thread has ticks that come before those that wait."""
    _is_squeezed: bool = False
    """There is something to write beside what waits."""

    @property
    def begins(self) -> bool:
        """The next tick must have no index: it is the first one of a file."""
        return self.folder is not None and self._begins

    @property
    def place(self) -> str:
        """File and number of the last tick; empty: no log is kept."""
        return f"{self._name}#{self._ticks - 1}" if self.folder is not None else ""

    @property
    def _name(self) -> str:
        return f"{self.epoch:08}-{self._files:04}{SUFFIX}"

    def note(self, facts: ControlFacts, memory: Memory, plan: Plan) -> None:
        """Take note of a tick."""
        if self.folder is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            log.warning("the decision log cannot keep up", action="decision_log_behind")
            self._give_up()
            return
        self._waiting.append(noted(facts, memory, plan, first=self._begins))
        self._begins = False
        self._ticks += 1

    def squeeze(self) -> None:
        """Make changes of what was noted, for the thread to write; after a turn."""
        if self._writer is None or self._is_appending:
            return
        while self._waiting and self._waiting[0].handed is None:
            self._writer.write(self._waiting.popleft())
            self._is_squeezed = True

    async def run(self) -> None:
        """Write what was noted, for ever."""
        if self.folder is None:
            return
        try:
            async for _ in every(WRITE_S):
                await self.write()
        finally:
            self.close()

    def close(self) -> None:
        """Write what was noted, and end the file."""
        self._end(self._waiting)
        self._waiting.clear()

    async def write(self) -> None:
        """Write what was noted since the last time."""
        self.squeeze()  # A thread that computes takes the interpreter from the next tick.
        ticks = list(self._waiting)
        self._waiting.clear()
        if not ticks and not self._is_squeezed:
            return
        self._is_appending, self._is_squeezed = True, False
        try:
            size_bytes = await asyncio.to_thread(self._append, ticks)
        except OSError as error:
            log.warning(
                "the decision log cannot be written",
                action="decision_log_failed",
                folder=str(self.folder),
                error=str(error),
            )
            self._give_up()
            return
        finally:
            self._is_appending = False
        if size_bytes > self.file_bytes:
            self._give_up()

    def _append(self, ticks: "list[Noted] | deque[Noted]") -> int:
        with self._writing:
            for one in ticks:
                if one.handed is not None:
                    self._writer = self._open()
                if self._writer is not None:
                    self._writer.write(one)
            if self._writer is None:
                return 0
            self._writer.flush()
            return self._writer.size_bytes

    def _open(self) -> LogWriter:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._trim()
        header = Header(
            format=FORMAT,
            policy_version=policy_version(),
            epoch=self.epoch,
            started_at_s=self.clock.wall().timestamp(),
            rules=rules_change(self.rules),
            eviction=self.rules.scheme.placement.policy.name,
        )
        return LogWriter((self.folder / self._name).open("wb"), header)

    def _trim(self) -> None:
        """Remove the oldest files, so that what is kept leaves room for one more."""
        assert self.folder is not None
        files = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda one: one.stat().st_mtime)
        total = sum(one.stat().st_size for one in files)
        for file in files:
            if total + self.file_bytes <= self.keep_bytes:
                break
            total -= file.stat().st_size
            file.unlink(missing_ok=True)

    def _give_up(self) -> None:
        """End the file; the next tick begins another one."""
        self._end(())
        self._waiting.clear()
        self._files += 1
        self._ticks = 0
        self._begins = True

    def _end(self, ticks: "deque[Noted] | tuple[()]") -> None:
        try:
            if ticks:
                self._append(ticks)
            with self._writing:
                writer, self._writer = self._writer, None
                if writer is not None:
                    writer.close()
        except OSError as error:
            log.warning(
                "the decision log was not ended", action="decision_log_failed", error=str(error)
            )
