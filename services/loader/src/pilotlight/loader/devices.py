"""What a node's workers run models on: its GPUs, one worker each, where it has some that can be
used; else its cores.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from pilotlight.common.driver_thread import DriverThread
from pilotlight.common.errors import BadRequest, DeadlineExceeded, MachineUnfit
from pilotlight.common.nvml import Gpu, NvmlFailed, NvmlUnavailable, list_gpus
from pilotlight.common.waiting import within
from pilotlight.loader.gpu_record import GpuRecord
from pilotlight.loader.opening_ahead import OPEN, OpeningAhead
from pilotlight.native.library import unavailable

log = structlog.get_logger()

LOOK_DEADLINE_S = 10.0
"""A driver that has not told by then which devices there are hangs."""
COMPILE_DEADLINE_S = 300.0
"""Native code that was not compiled when it was installed is now, which takes some ten seconds."""
OPEN_DEADLINE_S = 120.0
"""For torch to be imported, from a slow disk, and to open a device."""
KILLED_S = 1.0
"""A process that is stuck in the driver does not end when it is killed: it is waited for no longer.
"""
C_COMPILERS = ("gcc", "clang")
"""Where triton looks, if ``CC`` names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDevices:
    """The workers of a node: one for each entry."""

    kind: str
    devices: tuple[tuple[str, ...], ...]
    """Each worker's GPUs: their UUIDs, or the index of one whose UUID is not told. One for each
    worker; of other kinds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpus:
    """The GPUs that workers can use, or why there are none.

    A lost one is one of them: its worker says so, and waits for it.
    """

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""
    untold: bool = False
    """There may be some: the driver answers with an error, or not at all."""


def plan_workers(kind: str, workers: int | None, found: FoundGpus) -> WorkerDevices:
    """Which workers a node has.

    1. ``cpu`` and ``sim``: as many as are asked for, or one.
    2. ``cuda``: as many as are asked for, or one for each GPU; none may lack one.
    3. ``auto``: as ``cuda`` where there is a GPU for each that is asked for.
    4. ``auto``, and the driver does not say which there are: no workers. On cores a node would be a
       hundred times slower than it was yesterday, without a reason that an operator sees.
    5. ``auto``, else: as ``cpu``.

    Raises:
        BadRequest: ``cuda`` is asked for, and there are not as many GPUs.
        MachineUnfit: by 4.
    """
    if kind in ("cpu", "sim"):  # 1
        return WorkerDevices(kind=kind, devices=((),) * (1 if workers is None else workers))
    count = len(found.gpus) if workers is None else workers
    enough = len(found.gpus) >= max(1, count)
    if kind == "cuda" and not enough:  # 2
        have = (
            found.why_none or f"there {'is' if len(found.gpus) == 1 else 'are'} {len(found.gpus)}"
        )
        raise BadRequest(
            f"PILOTLIGHT_WORKER_KIND is cuda, and {max(1, count)} GPUs are needed: {have}"
        )
    if enough:  # 2, 3
        return WorkerDevices(
            kind="cuda", devices=tuple((gpu.uuid or str(gpu.index),) for gpu in found.gpus[:count])
        )
    if found.untold and not found.gpus and workers != 0:  # 4
        raise MachineUnfit(
            f"NVIDIA's driver does not say which GPUs there are: {found.why_none}. `nvidia-smi` and `dmesg | grep -e NVRM -e Xid` "
            "say more; reload the driver or reboot, or set PILOTLIGHT_WORKER_KIND=cpu for workers on CPU cores"
        )
    return WorkerDevices(kind="cpu", devices=((),) * (1 if workers is None else workers))  # 5


async def find_gpus(
    kind: str,
    environment: Mapping[str, str] = os.environ,
    kept: Path | None = None,
    opening: OpeningAhead | None = None,
) -> FoundGpus:
    """What GPUs can be used; those that ``CUDA_VISIBLE_DEVICES`` hides cannot.

    Looks only where the kind of workers depends on it.

    Workers that an earlier loader started may still run, each on the GPU that it got. So that they
    find themselves in the plan, a lost GPU keeps its place in it, and while the driver does not say
    which GPUs there are, those count that there were.

    Args:
        kind: of the workers, as it is asked for.
        environment: this process's.
        kept: the file of what an earlier run found.
        opening: a process in which torch opens a GPU, if one has begun already. It does not
            outlive this.
    """
    opening = opening or OpeningAhead()
    if kind not in ("auto", "cuda"):
        opening.give_up()
        return FoundGpus(why_none="none are wanted")
    record, shown = GpuRecord.read(kept), environment.get("CUDA_VISIBLE_DEVICES")
    driver = DriverThread("gpus")
    try:
        gpus = record.named(
            await within(LOOK_DEADLINE_S, driver.call(list_gpus), "asking the driver for GPUs")
        )
        seen = visible(gpus, shown)
        if not seen:
            return FoundGpus(
                why_none=f"of {len(gpus)} GPUs CUDA_VISIBLE_DEVICES shows none"
                if gpus
                else "the driver has none"
            )
        for gpu in (gpu for gpu in seen if gpu.lost):
            log.error(
                "a GPU is lost", action="gpu_lost", index=gpu.index, uuid=gpu.uuid, error=gpu.lost
            )
        software = _software(seen)
        why = await _why_not(driver, seen, opening, opened=record.opened_by == software != "")
    except NvmlUnavailable as error:
        return FoundGpus(why_none=str(error))
    except (NvmlFailed, DeadlineExceeded) as error:
        why = error.message if isinstance(error, DeadlineExceeded) else str(error)
        told = (
            "the driver hangs"
            if isinstance(error, DeadlineExceeded)
            else "the driver does not say which GPUs there are"
        )
        log.error(told, action="gpus_not_found", error=why, there_were=len(record.uuids))
        return FoundGpus(
            gpus=visible(record.gpus, shown),
            why_none=why,
            untold=shown is None or bool(shown.strip()),
        )
    finally:
        driver.close()
        opening.give_up()
    if why:
        log.warning(
            "GPUs are there and cannot be used", action="gpus_unusable", gpus=len(seen), error=why
        )
        return FoundGpus(why_none=why)
    _keep(
        GpuRecord(
            uuids={gpu.index: gpu.uuid for gpu in gpus if gpu.uuid},
            opened_by=software or record.opened_by,
        ),
        kept,
    )
    return FoundGpus(gpus=seen)


async def _why_not(
    driver: DriverThread, gpus: Sequence[Gpu], opening: OpeningAhead, opened: bool
) -> str:
    """Why an engine could not use these GPUs; empty if it could.

    ``opened``: a process with the same software has opened one before.
    """

    def still_unopened() -> str:
        # Lost ones are not tried: nothing is to be waited for.
        tried = any(not gpu.lost for gpu in gpus)
        return "" if tried and opening.opened(OPEN_DEADLINE_S) else unopened(gpus)

    try:
        if why := await within(COMPILE_DEADLINE_S, driver.call(unusable), "compiling native code"):
            return why
        # Not again each time: engines that are taken over use the GPU meanwhile, and their loader
        # is to be back soon.
        return (
            ""
            if opened
            else await within(3 * OPEN_DEADLINE_S, driver.call(still_unopened), "opening a GPU")
        )
    except DeadlineExceeded as error:
        return error.message


def visible(gpus: Sequence[Gpu], shown: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA shows a process, in its order.

    As CUDA does, the first word that names none ends the list.
    """
    if shown is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in filter(None, (word.strip() for word in shown.split(","))):
        named = [
            gpu
            for gpu in gpus
            if gpu.uuid.startswith(word) or (word.isdecimal() and gpu.index == int(word))
        ]
        if not named or named[0] in chosen:
            break
        chosen.append(named[0])
    return tuple(chosen)


def unusable() -> str:
    """Why an engine could not use a GPU here; empty if it could. May compile the native library."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed, which comes with torch's builds for CUDA"
    wanted = os.environ.get("CC")
    if not any(map(shutil.which, (wanted,) if wanted else C_COMPILERS)):
        named = (
            f"CC names {wanted}, which is not there"
            if wanted
            else "neither gcc nor clang is installed, and CC names none"
        )
        return f"triton needs a C compiler: {named} (apt-get install gcc)"
    return unavailable()


def unopened(gpus: Sequence[Gpu], command: Sequence[str] = (sys.executable, "-c", OPEN)) -> str:
    """Why torch opens none of the GPUs, in a process of its own; empty if it opens one.

    What is the matter with another one is its worker's to find. A process that hangs is left to
    itself.
    """
    why = ""
    for gpu in (gpu for gpu in gpus if not gpu.lost):
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpu.uuid,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        with tempfile.TemporaryFile() as told:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                start_new_session=True,
            )
            try:
                exit_code = child.wait(OPEN_DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(KILLED_S)
                return f"torch has not opened {gpu.name} {gpu.uuid} in {OPEN_DEADLINE_S:g} s, with driver {gpu.driver}"
            if exit_code == 0:
                return ""
            told.seek(0)
            words = told.read().decode(errors="replace").strip().splitlines() or [
                f"exit code {exit_code}"
            ]
        why = f"torch does not open {gpu.name} {gpu.uuid} with driver {gpu.driver}: {words[-1]}"
    return why


def _software(gpus: Sequence[Gpu]) -> str:
    """What decides whether a process can open a GPU; empty where all are lost."""
    driver = next((gpu.driver for gpu in gpus if not gpu.lost), "")
    try:
        return f"driver {driver}, torch {importlib.metadata.version('torch')}" if driver else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _keep(record: GpuRecord, path: Path | None) -> None:
    try:
        if path is not None:
            record.write(path)
    except OSError as error:
        log.warning("which GPUs there are is not kept", action="gpus_not_kept", error=str(error))
