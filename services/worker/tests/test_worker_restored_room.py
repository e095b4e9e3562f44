"""Room for KV is restored, with more free memory or less than the artifact's build had: computed,
in one piece of arithmetic, and checked against the recorded division (MEDUSA, section 6).
"""

from dataclasses import replace

import pytest
from artifact_listing import an_artifact
from hypothesis import assume, given
from hypothesis import strategies as st

from pilotlight.common.errors import RestoreFailed
from pilotlight.common.messages.codec import encode_json
from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.errors import NoRoom
from pilotlight.engine.models.registry import decoder_of
from pilotlight.engine.results import StageRoom
from pilotlight.engine.room import divide
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.materialized import Layout
from pilotlight.policy.model import Model
from pilotlight.worker.engine_child.restoring import Restoring

MIB = 1 << 20


class Granular(CpuArena):
    """One in which everything takes whole granules, as on a GPU."""

    whole_granules = True
    granule_bytes = MIB // 8


ARENAS = {
    "bytes": CpuArena(num_slots=1, slot_bytes=1 << 30),
    "granules": Granular(num_slots=1, slot_bytes=1 << 30),
}
BYTES = st.integers(MIB // 4, 64 * MIB)


def room_in(model: Model, arena: str, device_bytes: int) -> StageRoom:
    """What a stage has in so much memory; it computes, and runs nothing."""
    try:
        return divide(
            ARENAS[arena], decoder_of(model.spec), model.spec.whole, model.dtype, device_bytes
        )
    except NoRoom:
        assume(False)
        raise


def recorded(model: Model, device_bytes: int, room: StageRoom) -> bytes:
    layout = Layout(
        device_bytes=device_bytes,
        parameter_bytes=room.parameter_bytes,
        kv_bytes_per_token=room.kv_bytes_per_token,
        kv_capacity_tokens=room.kv_capacity_tokens,
    )
    return encode_json(an_artifact(model, layout=layout))


@pytest.mark.parametrize("arena", ARENAS)
@given(built=BYTES, given_bytes=BYTES)
def test_a_stage_with_other_memory_has_a_consistent_room(
    model: Model, arena: str, built: int, given_bytes: int
) -> None:
    manifest = recorded(model, built, room_in(model, arena, built))
    room = room_in(model, arena, given_bytes)
    Restoring().begin(InstanceId("i"), manifest, given_bytes, room)
    assert room.parameter_bytes + room.kv_capacity_tokens * room.kv_bytes_per_token <= given_bytes


@pytest.mark.parametrize("arena", ARENAS)
@given(built=BYTES, less=st.integers(1, 32 * MIB), blocks=st.integers(1, 100))
def test_a_room_that_the_recorded_division_cannot_have_is_refused(
    model: Model, arena: str, built: int, less: int, blocks: int
) -> None:
    room = room_in(model, arena, built)
    manifest = recorded(model, built, room)
    more = replace(room, kv_capacity_tokens=room.kv_capacity_tokens + blocks * BLOCK_TOKENS)
    for given_bytes in (built, built - less):
        with pytest.raises(RestoreFailed, match="had it for"):
            Restoring().begin(InstanceId("i"), manifest, given_bytes, more)
    other = replace(room, kv_bytes_per_token=room.kv_bytes_per_token + 2)
    with pytest.raises(RestoreFailed, match="was recorded"):
        Restoring().begin(InstanceId("i"), manifest, built, other)
