"""A start that the library began before Python had imported anything (``start.cpp``): begun here,
and attached to in ``started``. Imports nothing that takes time.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_void_p
from typing import Final

from pilotlight.native.plan import BadPlan, NativePlan


class Begun:
    """It goes on in threads of the library's own."""

    def __init__(self, plan: NativePlan) -> None:
        """Begins.

        Raises:
            OSError: there is no such library.
            AttributeError: it is another release's.
            BadPlan: the same.
        """
        self.plan: Final = plan
        self._library: Final = ctypes.CDLL(plan.library)
        begin: Callable[..., int] = self._library.pilotlight_start_begin
        pointer = c_void_p()
        if begin(ctypes.byref(plan.as_struct()), ctypes.byref(pointer)):
            raise BadPlan(f"{plan.library} is another release's")
        self.pointer: Final = pointer.value or 0

    def end(self) -> None:
        """Gives everything back; nobody has attached to it."""
        self._library.pilotlight_start_end(c_void_p(self.pointer))
