"""Parameters from a neighbour's device: two processes, each shown one device, of which one copies
from the arena of the other, bit for bit.

Devices are chosen as in ``test_gpu_channels.py``, which goes through a whole consolidation.
"""

import json
import os
from collections.abc import Callable

import pytest
import torch
from peer_pair import pair

from pilotlight.engine.cuda.lending import sum_of
from pilotlight.engine.device.lending import SUM_ROW_BYTES

pytestmark = pytest.mark.gpu

Record = Callable[[str, object], None]
SIZES = [2 << 20, 64 << 20, 512 << 20]
"""Of what is lent at once; a layer of an 8B model has 436 MB."""


@pytest.fixture
def shown(device: torch.device, record_property: Record) -> tuple[str, str]:
    """What each of the two processes is shown."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(number) for number in range(count)]
    record_property("devices", count)
    return names[0], names[-1]


@pytest.mark.parametrize("dies", [False, True])
def test_parts_are_copied_bit_for_bit(
    shown: tuple[str, str], record_property: Record, dies: bool
) -> None:
    """The last time when the other process has given its memory back, or was gone."""
    _, found = pair(("lends", "borrows"), shown, sizes=SIZES, dies=dies)
    assert found["wrong"] == []
    record_property("speeds", json.dumps(found["speeds"]))
    print(json.dumps({"devices": len(set(shown)), "speeds": found["speeds"]}))


def test_a_device_sums_up_as_the_host_does(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    row = torch.randint(256, (4096 * SUM_ROW_BYTES,), generator=generator, dtype=torch.uint8)
    assert int(sum_of(row.to(device))) == int(sum_of(row))
