"""Schedules of groups one after the other: the system that they share, and what is noted of
them.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.clients import Answer
from chaos.group_schedules import Schedule
from chaos.group_system import GroupSystem


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A schedule that was gone through."""

    schedule: Schedule
    stages: int
    """That the group had."""
    requests: int
    ended_before: int
    """As many of them had ended when it happened."""
    moved: int
    """Requests that gateways had go on at an instance that the group became."""
    with_kv: int
    """As many of them brought keys and values along."""
    starts: int
    """Of the model; more than one: its group was replaced, or had nothing left to serve."""
    repairs: int
    """Stages that another worker brought."""
    evicted: int
    """Stages that were given up because their room was taken."""
    took_s: float
    problems: tuple[str, ...]
    """What went wrong."""

    def __str__(self) -> str:
        return (
            f"{self.schedule}; {self.stages} stages, {self.ended_before} of {self.requests} requests "
            f"had ended, {self.moved} moved, {self.with_kv} with KV, {self.starts} starts, "
            f"{self.repairs} repairs, {self.evicted} evicted, {self.took_s:.1f} s"
        )

    def line(self) -> dict[str, Any]:
        """As it is noted."""
        schedule = self.schedule
        return {
            "seed": schedule.seed,
            "event": schedule.event.name.lower(),
            "moment": schedule.moment.name.lower(),
            "after_s": round(schedule.after_s, 3),
            "at": round(schedule.at, 3),
            "instances": schedule.instances,
            "workers": schedule.workers,
            "stages": self.stages,
            "requests": self.requests,
            "ended_before": self.ended_before,
            "moved": self.moved,
            "with_kv": self.with_kv,
            "starts": self.starts,
            "repairs": self.repairs,
            "evicted": self.evicted,
            "took_s": round(self.took_s, 1),
            "problems": list(self.problems),
        }


class Lines:
    """A file with a line for each schedule that was gone through; none without a path."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self.seeds: set[int] = set()
        """Those that stand there."""
        if self._path is not None:
            with suppress(FileNotFoundError):
                lines = self._path.read_text().splitlines()
                self.seeds = {json.loads(line)["seed"] for line in lines}

    def add(self, gone: Gone) -> None:
        """Notes one."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(gone.line()) + "\n")


class GroupKeeper:
    """Keeps one system for all schedules of a kind; a new one after a schedule that failed."""

    def __init__(self) -> None:
        self._system: GroupSystem | None = None
        self._references: dict[tuple[str, float, int | None], Answer] = {}

    async def system(self, workers: int) -> GroupSystem:
        """The one that stands, or a new one that has calmed down.

        Args:
            workers: on which its models lie when they are not disturbed.
        """
        if workers > 1 and not self._references:
            # What is right is what one worker says, where one has room for all.
            await self.system(1)
        if self._system is not None and self._system.workers != workers:
            self.close()
        if self._system is None:
            self._system = GroupSystem(workers)
            self._system.references = self._references
            try:
                await self._system.calm_down()
            except BaseException:
                self.spoil()
                raise
        return self._system

    def spoil(self) -> None:
        """Something went wrong: its files stay."""
        if self._system is not None:
            self._system.spoiled = True
            self.close()

    def close(self) -> None:
        if self._system is not None:
            self._system.close()
            self._system = None
