"""What a node keeps of its GPUs between runs of its loader, for when the driver does not say which
there are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from pilotlight.common.nvml import Gpu


class GpuRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier run found."""

    uuids: dict[int, str] = {}
    """By index: a driver that lost a GPU need not tell its UUID."""
    opened_by: str = ""
    """Driver and torch with which a process opened one."""

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """An empty one where there is nothing of use."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls) if path is not None else cls()
        except (OSError, msgspec.DecodeError):
            return cls()

    def write(self, path: Path) -> None:
        """Keep it for a later run.

        Raises:
            OSError: the file cannot be written.
        """
        making = path.with_suffix(".new")
        making.write_bytes(msgspec.json.encode(self))
        making.rename(path)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that were there."""
        return tuple(Gpu(index=index, uuid=uuid) for index, uuid in sorted(self.uuids.items()))

    def named(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """The same, lost ones with the UUID that they had, if no other has it."""
        taken = {gpu.uuid for gpu in gpus}
        known = {index: uuid for index, uuid in self.uuids.items() if uuid not in taken}
        return tuple(
            gpu if gpu.uuid else replace(gpu, uuid=known.get(gpu.index, "")) for gpu in gpus
        )
