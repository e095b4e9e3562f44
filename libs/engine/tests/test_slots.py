"""A model's own slot: the same addresses in every process, whatever was loaded before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.core.slots import SlotTable
from pilotlight.engine.device.arena import CpuArena
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.errors import NoRoom
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype


def test_a_model_has_its_home_or_the_next_free_slot() -> None:
    slots = SlotTable(4)
    assert [slots.take(home) for home in (2, 2, None, 2)] == [2, 3, 0, 1]
    with pytest.raises(NoRoom, match="every slot"):
        slots.take(2)
    slots.give_back(2)
    assert (slots.free, slots.take(1)) == (1, 2)


def test_a_home_beyond_the_slots_of_a_small_arena_is_one_of_them() -> None:
    assert SlotTable(4).take(14) == 2


@given(
    st.integers(1, 5),
    st.lists(st.one_of(st.none(), st.integers(0, 15), st.just("close")), max_size=30),
)
def test_a_slot_holds_one_model_and_a_free_home_is_always_taken(
    num_slots: int, moves: list[int | str | None]
) -> None:
    slots, taken = SlotTable(num_slots), list[int]()
    for move in moves:
        if isinstance(move, str):
            if taken:
                slots.give_back(taken.pop(0))
        elif len(taken) == num_slots:
            with pytest.raises(NoRoom):
                slots.take(move)
        else:
            number = slots.take(move)
            assert number not in taken
            assert 0 <= number < num_slots
            if move is not None and move % num_slots not in taken:
                assert number == move % num_slots
            taken.append(number)
        assert slots.free == num_slots - len(taken)


def test_what_is_loaded_before_a_model_does_not_move_it(checkpoint) -> None:
    decoder = decoder_of(checkpoint("llama").spec)

    def places(order: list[tuple[str, int]]) -> dict[str, set[int]]:
        arena = CpuArena()
        start = arena.tensor(0, (1,), torch.uint8).data_ptr()
        found: dict[str, set[int]] = {}
        for name, slot in order:
            memory = StageMemory(arena, decoder, decoder.spec.whole, Dtype.FLOAT32, slot)
            memory.resize(4)
            tensors = [tensor for part in memory.parts for tensor in memory.tensors(part).values()]
            tensors += [
                half
                for layer in range(decoder.spec.num_layers)
                for half in memory.keys_and_values(layer)
            ]
            found[name] = {tensor.data_ptr() - start for tensor in tensors}
        return found

    one, other = places([("a", 5), ("b", 11)]), places([("c", 0), ("b", 11), ("a", 5)])
    assert (one["a"], one["b"]) == (other["a"], other["b"])
    displaced = places([("b", 11), ("a", 11)])
    assert displaced["b"] == one["b"]
    assert not displaced["a"] & displaced["b"]
