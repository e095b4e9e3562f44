"""Shared memory that is full while the pool is filled: an error, never a signal that ends the
process.
"""

from pathlib import Path

import pytest
from confined import run_python

pytestmark = pytest.mark.slow

PROGRAM = """
import os
from pathlib import Path
from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import HostPoolFull
from pilotlight.dataplane.pool import HostPool
MIB = 1 << 20
folder = Path({folder!r})
(folder / "other").write_bytes(bytes(6 * MIB))
pool = HostPool.open(folder / "pool", 8 * MIB, SystemClock())
image = pool.reserve("d" * 64, 0, 4 * MIB, 1)
try:
    pool.write(image, 0, memoryview(bytes([7]) * (4 * MIB)))
    raise SystemExit("not refused")
except HostPoolFull as error:
    assert str(folder) in error.message, error.message
    assert "PILOTLIGHT_POOL_BYTES" in error.action
(folder / "other").unlink()
pool.write(image, 0, memoryview(bytes([7]) * (4 * MIB)))
with pool.view(image, 0, 4 * MIB) as view:
    assert bytes(view) == bytes([7]) * (4 * MIB)
pool.close(remove=True)
assert os.listdir(folder) == []
print("written")
"""


def test_memory_that_is_used_up_is_an_error(tmp_path: Path) -> None:
    done = run_python(PROGRAM.format(folder=str(tmp_path)), {tmp_path: "8m"})
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stdout + done.stderr
