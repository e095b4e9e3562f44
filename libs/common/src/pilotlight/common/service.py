"""The life of a service process.

One contract for everything long-lived: ``start`` returns when it is ready, ``stop`` returns when it
has stopped, both may be called twice. ``Application`` starts its components in order and stops them
in reverse, each with a deadline. A background task has an owner, and its death ends the process:
the supervisor starts it again, on a clean state.
"""

import asyncio
import ctypes
import gc
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from pilotlight.common.bus import Bus
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.clock_watch import watch_clock
from pilotlight.common.errors import (
    DiskFull,
    InternalError,
    PilotlightError,
    SettingsInvalid,
)
from pilotlight.common.fitness import check_files, check_folder
from pilotlight.common.health import HealthServer
from pilotlight.common.ids import new_incarnation
from pilotlight.common.machine import END_WITH_PARENT
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.settings import ServiceSettings
from pilotlight.common.store import ObjectStore
from pilotlight.common.telemetry import configure_logging, start_telemetry, stop_telemetry
from pilotlight.common.waiting import cancel_all

log = structlog.get_logger()

STOP_DEADLINE_S = 10.0
"""For each component; past it the next one is stopped all the same."""

PR_SET_PDEATHSIG = 1
START_FAILED = "start_failed"
SETTINGS_INVALID = "settings_invalid"
TASK_DIED = "task_died"
"""``action`` of the last log line of a service that cannot start: the process that started it tells
of it in the words of its ``error``."""
LOOKS_FOR_GARBAGE = (10_000, 20, 200)
"""New objects, looks at those, and looks at what survived them, before the next wider look.

By Python's own (700, 10, 10) a gateway with thousands of requests under way looks at all of them
every second, a fifth of a second each time: with a third of its core gone it has more under way.
"""

S = TypeVar("S", bound=ServiceSettings)
S_co = TypeVar("S_co", bound=ServiceSettings, covariant=True)


class Component(Protocol):
    """Something long-lived within a service."""

    async def start(self) -> None:
        """Return when ready."""
        ...

    async def stop(self) -> None:
        """Return when stopped."""
        ...


class Background:
    """Owns background tasks. The first that dies with an error ends the process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run in the background until it ends or ``stop`` is called."""
        task = asyncio.create_task(work, name=name)
        self.own(task)
        return task

    def own(self, task: asyncio.Task[Any]) -> None:
        """Own a task that was begun before there was an owner."""
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def stop(self) -> None:
        """Cancel what still runs and wait for it."""
        await cancel_all(self._tasks)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error(
                "background task died",
                action=TASK_DIED,
                task=task.get_name(),
                error=repr(error),
                exc_info=error,
            )
            if not self.failed.done():
                self.failed.set_result(f"{task.get_name()}: {error!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context(Generic[S_co]):
    """What a service is built from."""

    service: str
    settings: S_co
    clock: Clock
    bus: Bus
    store: ObjectStore
    background: Background
    metrics: CollectorRegistry
    incarnation: str


@dataclass(slots=True, kw_only=True)
class Application:
    """A built service."""

    components: list[Component] = field(default_factory=list[Component])
    """In order of start."""
    ready: Callable[[], str | None] = lambda: None
    """Why the service cannot work at the moment, or None when it can."""


Build = Callable[[Context[S]], Awaitable[Application]]


def run_service(
    service: str, settings_type: type[S], build: Build[S], *, user: str | None = None
) -> int:
    """Run a service until SIGTERM or SIGINT; the process's exit status.

    Readiness is told to the process that started this one as
    systemd does it: ``READY=1`` on the socket that NOTIFY_SOCKET names.

    Args:
        service: its name, in logs, metrics and subjects.
        settings_type: read from the environment.
        build: makes the application within the event loop.
        user: its NATS user; None: the service's name.
    """
    configure_logging(service)
    _end_with_parent()
    try:
        settings = settings_type()
    except SettingsInvalid as error:
        log.error(
            "settings are wrong",
            action=SETTINGS_INVALID,
            code=error.code,
            error=error.message,
            what_to_do=error.action,
        )
        return 2
    try:
        check_files()
        check_or_warn(settings.run_dir, "folder for sockets", "PILOTLIGHT_RUN_DIR")
        return uvloop.run(_run(service, settings, build, user or service))
    except PilotlightError as error:
        log.error(
            "cannot start",
            action=START_FAILED,
            code=error.code,
            error=error.message,
            what_to_do=error.action,
        )
        return 1
    except Exception as error:  # a bug is told to the process that started this one, too
        log.exception(
            "cannot start",
            action=START_FAILED,
            code=InternalError.code,
            error=repr(error),
            what_to_do=InternalError.action,
        )
        return 1


def check_or_warn(folder: Path, what: str, setting: str) -> None:
    """As ``fitness.check_folder``, but for a full disk: what died on one comes back at once, as far
    as it has nothing to write.

    Raises:
        FolderUnusable: it cannot be written to.
    """
    try:
        check_folder(folder, what, setting)
    except DiskFull as error:
        log.warning(
            "a disk is full", action="disk_full", error=error.message, what_to_do=error.action
        )


async def _run(service: str, settings: S, build: Build[S], user: str) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    clock = SystemClock()
    incarnation = new_incarnation()
    store = ObjectStore.from_url(settings.object_store_url, settings)
    bus = await NatsBus.connect(settings, user=user, name=f"{service}-{incarnation}")
    background = Background()
    if bus.task is not None:
        background.own(bus.task)
    background.spawn("check writes to the bus", bus.check_writes())
    background.spawn("watch the clock", watch_clock(clock))
    metrics = CollectorRegistry()
    start_telemetry(service, settings, bus, metrics=metrics)
    context = Context(
        service=service,
        settings=settings,
        clock=clock,
        bus=bus,
        store=store,
        background=background,
        metrics=metrics,
        incarnation=incarnation,
    )
    started: list[Component] = []
    try:
        application = await build(context)
        health = HealthServer(
            settings.run_dir / f"{service}-{os.getpid()}.sock", metrics, bus, application
        )
        for component in (*application.components, health):
            await component.start()
            started.append(component)
        # What a service is made of stays: a collection that looks at all of it takes tens of
        # milliseconds, in which no request gets on.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*LOOKS_FOR_GARBAGE)
        notify("READY=1")
        log.info("ready", action="service_ready", pid=os.getpid())
        return await _until_stopped(stopping, background)
    finally:
        notify("STOPPING=1")
        for component in reversed(started):
            await _stop(component)
        await background.stop()
        await stop_telemetry()
        await bus.close()
        log.info("stopped", action="service_stopped")


async def _until_stopped(stopping: asyncio.Event, background: Background) -> int:
    waiting = asyncio.create_task(stopping.wait(), name="wait for a signal")
    await asyncio.wait({waiting, background.failed}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return 1 if background.failed.done() else 0


async def _stop(component: Component) -> None:
    try:
        async with asyncio.timeout(STOP_DEADLINE_S):
            await component.stop()
    except TimeoutError:
        log.error(
            "component did not stop in time",
            action="stop_deadline",
            component=type(component).__name__,
        )
    except Exception:  # the components below it must still be stopped
        log.exception(
            "component failed to stop", action="stop_failed", component=type(component).__name__
        )


def _end_with_parent() -> None:
    """Get SIGTERM when the supervisor dies, where it asks for that; its pid tells whether it died
    before we could ask for it.

    The variable is taken out of the environment: what a service starts has ties of its own (workers
    outlive their loader).
    """
    parent = os.environ.pop(END_WITH_PARENT, None)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def notify(state: str) -> None:
    """Tell the process manager, where there is one (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(state.encode())
        except OSError as error:
            log.debug("nobody listens to our state", action="notify_failed", error=str(error))
