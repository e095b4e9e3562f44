"""Starting kernels without what triton does on every launch: with some twenty arguments, that takes
longer than a small kernel runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from pilotlight.engine.watching import compiling

Constant = int | bool


class Kernel:
    """A triton kernel of tensors, numbers and constants, in this order.

    Compiled anew for every set of constants, dtype of the first tensor and variant. All tensors
    begin at multiples of 16 bytes and whole numbers are multiples of 16, which is what triton was
    told when it compiled; a process has one device.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], Any] = {}

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
        compiled = self._compiled.get(key)
        if compiled is None:
            # Under triton's interpreter nothing is compiled, and every launch comes here.
            with compiling():
                self._compiled[key] = self._function[grid](
                    *arguments, *constants, num_warps=warps, num_stages=stages
                )
            return
        if not (grid[0] and grid[1]):
            return
        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        compiled.run(
            grid[0],
            grid[1],
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
            *constants,
        )
