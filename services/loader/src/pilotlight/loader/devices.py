"""What a node's workers run models on: its GPUs, one worker each, where it has some that can be used; else its cores."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from pilotlight.common.apart import Apart
from pilotlight.common.errors import BadRequest, DeadlineExceeded
from pilotlight.common.nvml import Gpu, NvmlUnavailable, list_gpus
from pilotlight.common.waiting import within
from pilotlight.native.library import unavailable

log = structlog.get_logger()

LOOK_DEADLINE_S = 10.0
"""A driver that has not told by then which devices there are hangs."""
COMPILE_DEADLINE_S = 300.0
"""Native code that was not compiled when it was installed is now, which takes some ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDevices:
    """The workers of a node: one for each entry."""

    kind: str
    devices: tuple[str, ...]
    """Of GPUs their UUIDs; of others empty words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpus:
    """The GPUs that workers can use, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""


def plan_workers(kind: str, workers: int | None, found: FoundGpus) -> WorkerDevices:
    """Which workers a node has.

    1. ``cpu`` and ``sim``: as many as are asked for, or one.
    2. ``cuda``: as many as are asked for, or one for each GPU; none may lack one.
    3. ``auto``: as ``cuda`` where there is a GPU for each that is asked for, else as ``cpu``.

    Raises:
        BadRequest: ``cuda`` is asked for, and there are not as many GPUs.
    """
    if kind in ("cpu", "sim"):  # 1
        return WorkerDevices(kind=kind, devices=("",) * (1 if workers is None else workers))
    count = len(found.gpus) if workers is None else workers
    enough = len(found.gpus) >= max(1, count)
    if kind == "cuda" and not enough:  # 2
        have = found.why_none or f"there {'is' if len(found.gpus) == 1 else 'are'} {len(found.gpus)}"
        raise BadRequest(f"PILOTLIGHT_WORKER_KIND is cuda, and {max(1, count)} GPUs are needed: {have}")
    if enough:
        return WorkerDevices(kind="cuda", devices=tuple(gpu.uuid for gpu in found.gpus[:count]))
    return WorkerDevices(kind="cpu", devices=("",) * (1 if workers is None else workers))  # 3


async def find_gpus(kind: str, environment: Mapping[str, str] = os.environ) -> FoundGpus:
    """What GPUs can be used; those that ``CUDA_VISIBLE_DEVICES`` hides cannot. Looks only where the kind of workers depends on it."""
    if kind not in ("auto", "cuda"):
        return FoundGpus(why_none="none are wanted")
    apart = Apart("gpus")
    try:
        gpus = await within(LOOK_DEADLINE_S, apart.call(list_gpus), "asking the driver for GPUs")
        seen = visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
        if not seen:
            return FoundGpus(why_none=f"of {len(gpus)} GPUs CUDA_VISIBLE_DEVICES shows none")
        if why := await within(COMPILE_DEADLINE_S, apart.call(unusable), "looking at native code"):
            return FoundGpus(why_none=why)
    except NvmlUnavailable as error:
        return FoundGpus(why_none=str(error))
    except DeadlineExceeded as error:
        log.error("the driver hangs", action="gpus_not_found", error=error.message)
        return FoundGpus(why_none=error.message)
    finally:
        apart.close()
    return FoundGpus(gpus=seen)


def visible(gpus: Sequence[Gpu], shown: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA shows a process, in its order. As CUDA does, the first word that names none ends the list."""
    if shown is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in filter(None, (word.strip() for word in shown.split(","))):
        named = [gpu for gpu in gpus if gpu.uuid.startswith(word) or (word.isdecimal() and gpu.index == int(word))]
        if not named or named[0] in chosen:
            break
        chosen.append(named[0])
    return tuple(chosen)


def unusable() -> str:
    """Why an engine could not use a GPU here; empty if it could. May compile the native library."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed, which comes with torch's builds for CUDA"
    return unavailable()
