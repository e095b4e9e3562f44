"""The channels to the engines of other stages, made while this engine runs.

A thread makes them, one pair after the other: to connect takes as long as the other engine needs to
look at its door, and streams of other models must not wait for that. Between them it lets those in
that come for something else (``KvSharing``).
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import structlog

from pilotlight.common.cluster_key import find_cluster_key
from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.handshake import CHANNEL_PURPOSE, Identity
from pilotlight.common.messages.pipelines import ConnectStage, OpenDoor
from pilotlight.engine.channel.channel import Channel
from pilotlight.engine.errors import BadRequest, EngineError, PeerLost
from pilotlight.worker.engine_child.kv_sharing import ABOUT, KvSharing

if TYPE_CHECKING:
    from pilotlight.engine.channel.device_path import DeviceMemory, Devices
    from pilotlight.engine.channel.door import Door

log = structlog.get_logger()

IDLE_S = 60.0
"""How long the thread waits for somebody to come: channels that nobody takes go after that."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What came of a command."""

    command: ConnectStage
    channels: tuple[Channel, Channel] | EngineError
    """From the stage before and to the one behind; or why there are none."""


class Neighbours:
    """Owns the door and the thread that looks at it."""

    def __init__(
        self, monotonic_s: Callable[[], float], memory: "DeviceMemory | None" = None
    ) -> None:
        """No door is open yet.

        Args:
            monotonic_s: the clock of deadlines.
            memory: of the engine's device, where other engines can map it.
        """
        self._monotonic_s = monotonic_s
        self._memory = memory
        self._devices: Devices | None = None
        self.kv = KvSharing(monotonic_s, lambda: self._me, self.wake, lambda: self._devices)
        """Whom those visit who are no stages."""
        self._door: Door | None = None
        self._me: Identity | None = None
        self._wanted: SimpleQueue[ConnectStage] = SimpleQueue()
        self._joined: SimpleQueue[Joined] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wanted_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when something is wanted."""
        for descriptor in (self._wake_fd, self._wanted_fd):
            weakref.finalize(self, os.close, descriptor).atexit = False

    @property
    def wake_fd(self) -> int:
        """Readable when ``take`` would give something."""
        return self._wake_fd

    def wake(self) -> None:
        """Make ``wake_fd`` readable. From any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def open_door(self, command: OpenDoor) -> int:
        """Listens; the port. Asked again, it is the same one.

        Raises:
            SettingsInvalid: the cluster has no key.
            OSError: the address cannot be had.
        """
        if self._door is None:
            key = find_cluster_key(Path(command.secrets_dir), CHANNEL_PURPOSE)
            if key is None:
                raise SettingsInvalid(
                    "engines of several stages need the secret cluster-key, the same on every node"
                )
            # Only here: most engines have no neighbours.
            from pilotlight.engine.channel.device_path import Devices
            from pilotlight.engine.channel.door import Door

            if self._memory is not None:
                self._devices = Devices(self._memory, _say_way)
            self._me = Identity(command.node_id, key)
            self._door = Door(self._me, (command.host, 0), self._monotonic_s, devices=self._devices)
            # It ends with the process: what it waits for may never come.
            threading.Thread(target=self._attend, name="neighbours", daemon=True).start()
        return self._door.port

    def connect(self, command: ConnectStage) -> None:
        """Begins to make a stage's channels; ``take`` gives them.

        Raises:
            BadRequest: no door is open.
        """
        if self._door is None:
            raise BadRequest(f"{command.instance_id} cannot be connected: the engine has no door")
        self._wanted.put(command)
        os.eventfd_write(self._wanted_fd, 1)

    def take(self) -> tuple[Joined, ...]:
        """What has been made since the last call."""
        if self._door is None:
            return ()
        found: list[Joined] = []
        # Before the queue is looked at: what comes after that wakes again.
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while not self._joined.empty():
            found.append(self._joined.get())
        return tuple(found)

    def _attend(self) -> None:
        assert self._door is not None
        while True:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wanted_fd)
            while not self._wanted.empty():
                command = self._wanted.get()
                self._joined.put(Joined(command, self._join(command)))
                self.wake()
            try:
                for channel in self._door.guests(ABOUT):
                    self.kv.visit(channel)
                self._door.wait(IDLE_S, self._wanted_fd)
            except (EngineError, OSError) as error:
                log.warning("a visitor was lost", action="visitor_lost", why=str(error))

    def _join(self, command: ConnectStage) -> tuple[Channel, Channel] | EngineError:
        assert self._door is not None
        assert self._me is not None
        from pilotlight.engine.pipeline.joining import NextStage, join

        behind = command.behind
        following = NextStage(behind.node_id, (behind.host, behind.port), behind.stage)
        try:
            return join(
                self._door,
                self._me,
                command.instance_id,
                command.stage,
                following,
                self._monotonic_s,
                command.timeout_s,
                self._devices,
            )
        except EngineError as error:
            return error
        except OSError as error:
            return PeerLost(f"{behind.node_id} cannot be reached: {error}")


def _say_way(way: str) -> None:
    log.info("how what lies on the device goes to another engine", action="channel_way", way=way)
