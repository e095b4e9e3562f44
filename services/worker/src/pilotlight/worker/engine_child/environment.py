"""What artifacts depend on, as the engine's process sees it."""

from importlib.metadata import PackageNotFoundError, version

import torch

from pilotlight.common.machine import driver_version
from pilotlight.common.source_digest import release_of
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.materialized import Environment
from pilotlight.worker.engine_child.device import OpenDevice


def environment_of(device: OpenDevice) -> Environment:
    """What this process's engine runs on."""
    arena = device.arena
    is_cuda = arena.device.type == "cuda"
    memory_bytes = torch.cuda.mem_get_info(arena.device)[1] if is_cuda else 0
    return Environment(
        engine="/".join(release_of(name) for name in ("engine", "native")),
        device_kind=DeviceKind.CUDA if is_cuda else DeviceKind.CPU,
        device_name=device.name,
        memory_bytes=memory_bytes,
        driver=driver_version() if is_cuda else "",
        cuda=torch.version.cuda or "" if is_cuda else "",
        torch=str(torch.__version__),
        kernels=_version("triton") if is_cuda else "",
        arena_address=arena.address,
        granule_bytes=arena.granule_bytes,
        step_tokens=device.limits.step_tokens,
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
