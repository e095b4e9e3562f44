"""What a process that becomes an engine does before it has imported anything: as the one before it
had it in the end. Imports nothing that takes time.
"""

import ctypes
import json
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint64
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

FORMAT = 1
DIGEST_BYTES = 32
MOST_BYTES = 1 << 20
"""Of a plan's file."""
PLAN, TRYING = "start.json", "start.trying.json"
"""A plan, and one whose process is not up yet: if it never is, the next one does without."""
_NUMBERS = POINTER(c_uint64)


class BadPlan(Exception):
    """It is none, or may be somebody else's; the message says why."""


class StartPlan(ctypes.Structure):
    """``StartPlan`` of ``start.cpp``."""

    _fields_ = (
        ("plan_bytes", c_uint64),
        ("driver", c_char_p),
        ("address", c_uint64),
        ("num_bytes", c_uint64),
        ("ranges", _NUMBERS),
        ("num_ranges", c_uint64),
        ("archive", c_char_p),
        ("archive_bytes", c_uint64),
        ("digest", ctypes.c_uint8 * DIGEST_BYTES),
        ("sizes", _NUMBERS),
        ("num_sizes", c_uint64),
        ("ordinal", c_int),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGraphs:
    """An archive of graphs, in a file."""

    path: str
    size_bytes: int
    digest: str
    """BLAKE3."""
    sizes: tuple[int, ...]
    """Of its graphs, in the order in which they are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePlan:
    """Of one start."""

    layout: str
    """A hash over all that must be as it was; who attaches compares it."""
    library: str
    """The compiled library's file."""
    driver: str
    address: int
    """Of the arena, ..."""
    num_bytes: int
    ranges: tuple[tuple[int, int, int], ...]
    """... and what of it has memory: [start, stop) in order, and how long a chunk is at most."""
    graphs: PlannedGraphs | None = None

    def as_json(self) -> bytes:
        """As ``from_json`` takes it."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """A plan from its bytes.

        Raises:
            BadPlan: they are none.
        """
        try:
            said: dict[str, Any] = json.loads(data)
            if said.pop("format") != FORMAT:
                raise BadPlan("another format")
            graphs: dict[str, Any] | None = said.pop("graphs")
            if graphs is not None:
                graphs["sizes"] = tuple(graphs["sizes"])
            ranges = tuple(
                (int(start), int(stop), int(chunk)) for start, stop, chunk in said.pop("ranges")
            )
            made = cls(
                **said,
                ranges=ranges,
                graphs=None if graphs is None else PlannedGraphs(**graphs),
            )
            made.as_struct()
        except (ValueError, TypeError, KeyError, AttributeError, ctypes.ArgumentError) as error:
            raise BadPlan(f"no plan: {error}") from error
        return made

    def as_struct(self) -> StartPlan:
        """As the library takes it; what it points to lives for as long as it does."""
        bounds = [bound for each in self.ranges for bound in each]
        made = StartPlan(
            plan_bytes=ctypes.sizeof(StartPlan),
            driver=self.driver.encode(),
            address=self.address,
            num_bytes=self.num_bytes,
            ranges=_array(bounds),
            num_ranges=len(self.ranges),
        )
        if (graphs := self.graphs) is not None:
            digest = bytes.fromhex(graphs.digest)
            if len(digest) != DIGEST_BYTES:
                raise ValueError("a digest has 32 bytes")
            made.archive, made.archive_bytes = graphs.path.encode(), graphs.size_bytes
            made.digest = (ctypes.c_uint8 * DIGEST_BYTES)(*digest)
            made.sizes, made.num_sizes = _array(graphs.sizes), len(graphs.sizes)
        return made


def taken_plan(folder: Path) -> NativePlan | None:
    """The plan in a folder, for a process that begins; from now on it is tried (``kept_plan``).
    None: there is none.

    Raises:
        BadPlan: another user could have written it, or it is none. It is gone then.
        OSError: it cannot be read or moved.
    """
    path, trying = folder / PLAN, folder / TRYING
    try:
        path.rename(trying)
    except FileNotFoundError:
        return None
    descriptor = os.open(trying, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        for status in (folder.stat(), os.fstat(descriptor)):
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise BadPlan(f"others may write {folder} or the plan in it")
        return NativePlan.from_json(file.read(MOST_BYTES))


def kept_plan(folder: Path) -> None:
    """What was planned has done no harm: the next process has it, too, unless there is a newer one.

    Raises:
        OSError: it cannot be moved.
    """
    trying = folder / TRYING
    try:
        os.link(trying, folder / PLAN)
    except FileExistsError:
        pass
    except FileNotFoundError:
        return
    trying.unlink(missing_ok=True)


def _array(numbers: Sequence[int]) -> "ctypes.Array[c_uint64]":
    return (c_uint64 * len(numbers))(*numbers)
