"""What an engine's process finds done when it has imported everything: the library began it from a
plan (``engine_main``), and it is taken where it is what this engine would do.
"""

import sys
from hashlib import blake2b

import structlog
import torch

from pilotlight.common.machine import driver_version
from pilotlight.common.source_digest import release_of
from pilotlight.engine.cuda import arena
from pilotlight.native.library import NativeError, NativeUnavailable
from pilotlight.native.started import NativeStart
from pilotlight.native.starting import Begun

log = structlog.get_logger()


def layout_hash(device: torch.device) -> str:
    """Over all that places in an arena, graphs and their kernels depend on, but for the model: of
    two processes with the same one, the one can go on where the other began.

    Args:
        device: the engine's.
    """
    facts = (
        release_of("engine"),
        release_of("native"),
        sys.version,
        str(torch.__version__),
        driver_version(),
        torch.cuda.get_device_name(device),
        torch.cuda.mem_get_info(device)[1],
        arena.ADDRESSES[0],
        (arena.NUM_SLOTS, arena.SLOT_BYTES, arena.STEPS_BYTES, arena.POOL_BYTES),
        (arena.CHUNK_BYTES, arena.POOL_CHUNK_BYTES),
    )
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def attached(begun: Begun) -> NativeStart | None:
    """What the library has begun, once the device has a context; None: nothing that can be used."""
    try:
        start = NativeStart(begun)
    except (NativeUnavailable, NativeError) as error:
        begun.end()
        _refuse("library", str(error))
        return None
    try:
        start.wait("context")
    except NativeError as error:
        start.close()
        _refuse("context", str(error))
        return None
    return start


def checked(start: NativeStart, device: torch.device) -> NativeStart | None:
    """The same, if it was planned for what is here; None: it was not, and is given back."""
    if start.plan.layout == layout_hash(device):
        return start
    start.close()
    _refuse("layout", "the plan is of another release, driver or device")
    return None


def _refuse(field: str, why: str) -> None:
    log.warning("what was begun is not used", action="start_refused", field=field, why=why)
