"""What a node keeps between runs of its loader: its id, and the highest epoch when the pool goes;
and how large its pool is.
"""

import os
from pathlib import Path

from pilotlight.common.fitness import folder_error
from pilotlight.common.ids import new_node_id
from pilotlight.common.machine import memory_bytes
from pilotlight.policy.ids import Epoch, NodeId

POOL_SHARE = 0.25
"""Of the host's memory, where the pool's size is not set."""
FILE_SYSTEM_SHARE = 0.9

_NODE_ID_FILE = "node-id"
_EPOCH_FILE = "highest-epoch"


def node_id_of(state_dir: Path) -> NodeId:
    """The node's id, made once and kept.

    Raises:
        DiskFull, FolderUnusable: there is none yet, and none can be written down; or it cannot be
            read.
    """
    path = state_dir / _NODE_ID_FILE
    try:
        if not path.exists():
            state_dir.mkdir(parents=True, exist_ok=True)
            _write(path, new_node_id())
        return NodeId(path.read_text().strip())
    except OSError as error:
        raise folder_error(state_dir, "state folder", "PILOTLIGHT_STATE_DIR", error) from error


def load_epoch(state_dir: Path) -> Epoch:
    """The highest epoch that an earlier loader saw before it removed its pool; 0 when none did."""
    path = state_dir / _EPOCH_FILE
    return Epoch(int(path.read_text())) if path.exists() else Epoch(0)


def save_epoch(state_dir: Path, epoch: Epoch) -> None:
    """Keep the highest epoch when the pool, which else has it, is removed."""
    _write(state_dir / _EPOCH_FILE, str(epoch))


def default_pool_bytes(folder: Path) -> int:
    """A quarter of the memory, and no more than the folder's file system, which shared memory of a
    container often limits.
    """
    found = os.statvfs(folder)
    return min(
        int(memory_bytes() * POOL_SHARE), int(found.f_blocks * found.f_frsize * FILE_SYSTEM_SHARE)
    )


def _write(path: Path, text: str) -> None:
    """Replace a file whole: a crash leaves the old one or the new one."""
    making = path.with_name(f"{path.name}.new")
    with making.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    making.rename(path)
