"""What a cold engine's first token need not wait for: modules of torch that nothing here uses, and
what goes on beside the imports.

::

    main thread   [ our own )[ torch ............ )[ the engine, triton )[ device, probes )[ up
    beside        [ library, driver, context )                           [ triton's digest of itself ...
"""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from pilotlight.common.clock import Clock
from pilotlight.common.machine import DEVICES, gpus_shown
from pilotlight.native.device import LIBCUDA, Device
from pilotlight.native.library import NativeError, NativeUnavailable

ENGINE_MODULES = (
    "pilotlight.engine.engine",
    "pilotlight.worker.engine_child.device",
    "pilotlight.worker.engine_child.environment",
    "pilotlight.worker.engine_child.warmup",
)
CUDA_MODULES = tuple(
    f"pilotlight.engine.cuda.{name}" for name in ("arena", "graphs", "peers", "runner", "sampler")
)
"""What an engine on a GPU needs besides; none of them opens a device when it is imported."""
NOT_AT_START = (
    "torch._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.quantization",
)
"""What torch imports at its own end, where nothing of it is built on that. The first is shapes of
operations on tensors without memory, for compilers: a quarter of its import's processor time. The
others have a tenth of its modules."""
WARM_UP_AFTER_S = 1.0
"""An engine that has come up and gets no model meanwhile warms up by itself. Before that a request
may have waited for it, and its model is on the way."""

IDLE_S = 0.05
"""An engine that has had nothing to do for so long does something for later: longer than the
pauses of one client that asks for one answer after the other."""


class _Later(ModuleType):
    """Stands where a module will be, and is that as soon as something of it is asked for, a module
    within it among that.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_torch() -> None:
    """Imports torch without ``NOT_AT_START``, which who imports it afterwards still gets."""
    if "torch" in sys.modules:
        return
    later = {name: _Later(name) for name in NOT_AT_START if name not in sys.modules}
    sys.modules.update(later)
    try:
        importlib.import_module("torch")
    finally:
        for name, module in later.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def import_engine(*, cuda: bool) -> None:
    """Imports everything that an engine needs before its first token.

    Without the garbage collector, which looks at all modules again and again while they become more
    and finds nothing that can go.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        import_torch()
        for name in (*ENGINE_MODULES, *(CUDA_MODULES if cuda else ())):
            importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def beside(name: str, work: Callable[[], None]) -> threading.Thread:
    """Does something in a thread that the process does not wait for at its end."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def open_context(driver: str = LIBCUDA) -> None:
    """Makes the device's context, which torch finds there: a quarter of a second in which the
    driver needs no Python. What is wrong with a device says who opens it.
    """
    # As torch has it, which sets this before it opens a device.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    with suppress(NativeError, NativeUnavailable):
        Device(0, driver)


def context_ahead(
    work: Callable[[], None] = open_context, devices: Path = DEVICES
) -> threading.Thread | None:
    """Makes the context of the only GPU that this process can see, before it is told which one is
    its own; None where that is not known.

    Args:
        work: what makes it.
        devices: the folder with a file for each device of the machine.
    """
    only = gpus_shown(os.environ.get("CUDA_VISIBLE_DEVICES"), devices) == 1
    return beside("context", work) if only else None


def read_compiler() -> None:
    """Has triton read itself, which the first kernel would wait for."""
    from pilotlight.engine.cuda.kernels import caching

    caching.read_compiler()


class WarmUp:
    """What an engine does when no model comes soon after it is up. One that comes does that for
    itself, with its own kernels.
    """

    def __init__(
        self,
        clock: Clock,
        work: Callable[[Callable[[], bool]], bool] | None = None,
        after_s: float = WARM_UP_AFTER_S,
    ) -> None:
        """Nothing is due yet.

        Args:
            clock: for when it is.
            work: what is done, unless it is interrupted, as it is told how to ask; whether it was
                done. None: it has been.
            after_s: from when the engine is up.
        """
        self._clock = clock
        self._work = work
        self._after_s = after_s
        self._due_s: float | None = None

    def wait(self) -> None:
        """The engine is up."""
        if self._work is not None:
            self._due_s = self._clock.monotonic_s() + self._after_s

    def before(self, due_s: float | None) -> float | None:
        """When something is due, by this or by what is due at ``due_s``; None: nothing is."""
        return min((one for one in (self._due_s, due_s) if one is not None), default=None)

    def due(self, *, loading: bool) -> bool:
        """Whether it is to be done now; never any more, once something is ``loading``."""
        if self._due_s is None or loading:
            self._due_s = None
            return False
        return self._clock.monotonic_s() >= self._due_s

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Does it, once. If it is interrupted, it is due again when nothing has come for a while.

        Args:
            interrupted: whether something has come that is not to wait.
        """
        work, self._work, self._due_s = self._work, None, None
        if work is not None and not work(interrupted):
            self._work = work
            self.wait()


class IdleWork:
    """What an engine does for later, piece by piece, while it has nothing to do; what comes
    meanwhile waits for one piece, which takes some tens of milliseconds; cuDNN's first one, about a
    second.
    """

    def __init__(
        self,
        clock: Clock,
        work: Callable[[], bool],
        after_s: float = IDLE_S,
        again_s: float | None = None,
    ) -> None:
        """Nothing is due yet.

        Args:
            clock: for when it is.
            work: does a piece; whether there may be more.
            after_s: from when there is nothing to do.
            again_s: from when there was no more, until there may be; None: not before the engine
                had something to do.
        """
        self._clock, self._work, self._after_s = clock, work, after_s
        self._again_s = again_s
        self._due_s: float | None = None
        self._is_over = False

    def look(self, *, idle: bool) -> None:
        """Whether the engine has nothing to do. When it had something, there may be more of this,
        too.
        """
        if not idle:
            self._due_s, self._is_over = None, False
        elif self._due_s is None:
            self._due_s = self._clock.monotonic_s() + self._after_s

    def before(self, due_s: float | None) -> float | None:
        """When something is due, by this or by what is due at ``due_s``; None: nothing is."""
        own_s = None if self._is_over else self._due_s
        return min((one for one in (own_s, due_s) if one is not None), default=None)

    @property
    def due(self) -> bool:
        """A piece is to be done now."""
        if self._due_s is None or self._is_over:
            return False
        return self._clock.monotonic_s() >= self._due_s

    def run(self) -> None:
        """Does it."""
        if self._work():
            return
        if self._again_s is None:
            self._is_over = True
        else:
            self._due_s = self._clock.monotonic_s() + self._again_s
