"""Starting kernels without what triton does on every launch: with some twenty arguments, that takes
longer than a small kernel runs.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from pilotlight.engine.cuda.kernel_store import STORE
from pilotlight.engine.watching import compiling
from pilotlight.native.graphs import kernel_loaded

Constant = int | bool


@cache
def shared_bytes() -> int:
    """The most shared memory that a program can have: 227 KiB on an H200, 99 on an L4."""
    active = triton.runtime.driver.active
    return active.utils.get_device_properties(active.get_current_device())["max_shared_mem"]


class Kernel:
    """A triton kernel of tensors, numbers and constants, in this order.

    Compiled anew for every set of constants, dtype of the first tensor and variant. All tensors
    begin at multiples of 16 bytes and whole numbers are multiples of 16, which is what triton was
    told when it compiled; a process has one device.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._launches: dict[tuple[Any, ...], Callable[..., None]] = {}

    @property
    def compiled(self) -> list[Any]:
        """What triton made so far, in the order of the first launches: with ``n_regs``,
        ``n_spills`` and ``metadata``.
        """
        return list(self._compiled.values())

    def __call__(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Tensor | float],
        constants: tuple[Constant, ...],
        *,
        warps: int,
        stages: int = 3,
        variant: tuple[torch.dtype, ...] = (),
    ) -> None:
        """Launches.

        Args:
            grid: programs along both axes; nothing happens if one is 0.
            arguments: what changes from launch to launch.
            constants: what the kernel is compiled for.
            warps: of a program.
            stages: loads that loops keep under way.
            variant: dtypes of other tensors, where they do not follow from the first's.
        """
        first = arguments[0]
        key = (
            first.dtype if isinstance(first, Tensor) else None,
            constants,
            warps,
            stages,
            variant,
        )
        launch = self._launches.get(key)
        if launch is None:
            # Under triton's interpreter nothing is compiled, and every launch comes here.
            with compiling():
                made = self._first(grid, (*arguments, *constants), warps, stages)
            self._compiled[key] = made
            if made is not None:
                self._launches[key] = _launch_of(made)
                # All that are made of one function have its name.
                kernel_loaded(made.asm["cubin"], made.function)
            return
        if grid[0] and grid[1]:
            # Of a tensor, triton asks the driver whether the device can reach it, each time.
            addresses = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
            launch(*grid, 1, *addresses, *constants)

    def _first(self, grid: tuple[int, int], given: Sequence[Any], warps: int, stages: int) -> Any:
        """What triton has or makes, launched once."""
        try:
            return self._function[grid](*given, num_warps=warps, num_stages=stages)
        except Exception as error:
            # An artifact's kernel that does not work is compiled, as if there were none.
            if not STORE.give_up(f"{type(error).__name__}: {error}"):
                raise
            self._function.device_caches.clear()
            return self._function[grid](*given, num_warps=warps, num_stages=stages)


def _launch_of(compiled: Any) -> Callable[..., None]:
    """Starts what triton compiled, on the stream of the moment: with a grid of three, and the
    addresses of tensors in their places.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    active = triton.runtime.driver.active
    stream, device = active.get_current_stream, active.get_current_device()

    def launch(x: int, y: int, z: int, *arguments: float) -> None:
        run(x, y, z, stream(device), function, metadata, None, None, None, *arguments)

    return launch
