"""Room on devices whose memory comes in granules."""

from dataclasses import replace

import pytest

from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import Epoch
from pilotlight.policy.parallelism import SchemeRules, choose_scheme
from pilotlight.policy.plan import Snapshot
from pilotlight.policy.testing import NOW_S, model, node, worker

GRANULE = 2 << 20


def whole_granules(size_bytes: int) -> int:
    return -(-size_bytes // GRANULE) * GRANULE


@pytest.mark.parametrize("part_bytes", [10, GRANULE - 1, GRANULE, 3 * GRANULE + 1])
def test_the_least_room_holds_every_part_and_every_layers_keys_and_values(part_bytes: int) -> None:
    wanted = model(part_bytes=part_bytes)
    spec, stage = wanted.spec, wanted.spec.whole
    room = stage_room(wanted, stage, GRANULE)
    exact = stage_room(wanted, stage)
    half_bytes = (exact.least_bytes - wanted.device_bytes(stage)) // (2 * spec.num_layers)
    taken = sum(whole_granules(spec.part_bytes[part]) for part in spec.parts_of(stage))
    taken += 2 * spec.num_layers * whole_granules(half_bytes)
    assert taken <= room.least_bytes <= room.usual_bytes
    assert room.least_bytes - exact.least_bytes == room.usual_bytes - exact.usual_bytes


def test_a_small_model_is_granted_whole_granules() -> None:
    wanted = model()

    def granted(granule_bytes: int) -> int:
        one = worker(0, memory_bytes=1 << 30)
        one = replace(one, device=replace(one.device, granule_bytes=granule_bytes))
        world = Snapshot(
            now_s=NOW_S, epoch=Epoch(1), models=(wanted,), nodes=(node(),), workers=(one,)
        )
        choice = choose_scheme(wanted, world, SchemeRules())
        assert choice.scheme is not None
        return choice.scheme.placements[0].device_bytes

    assert (
        granted(GRANULE) >= stage_room(wanted, wanted.spec.whole, GRANULE).least_bytes > granted(1)
    )
