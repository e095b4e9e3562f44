"""What follows from a model alone."""

from collections import Counter
from dataclasses import replace

from pilotlight.policy.ids import Digest
from pilotlight.policy.model import SLOTS, Dtype
from pilotlight.policy.testing import model

ONE = model(digest="0123456789abcdef" * 4)


def test_a_slot_follows_from_checkpoint_and_dtype_and_never_changes() -> None:
    """What was recorded for a slot's addresses is of use to later releases only in that slot."""
    assert (ONE.slot, replace(ONE, dtype=Dtype.FLOAT16).slot) == (3, 2)
    assert (
        replace(ONE, name=model("other").name, uri="s3://elsewhere", pinned=True).slot == ONE.slot
    )


def test_slots_are_used_evenly() -> None:
    counts = Counter(model(digest=Digest(f"{number:064x}")).slot for number in range(1600))
    assert set(counts) == set(range(SLOTS))
    assert max(counts.values()) < 2 * 1600 / SLOTS
