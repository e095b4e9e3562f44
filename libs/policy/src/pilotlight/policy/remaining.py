"""Which stages of a group remain when it becomes a shorter pipeline: those that are to have the
layers of others, and those whose layers no other one is to have.

::

    stages    [0, 8)  [4, 8)  [8, 16)  [12, 16)
    remain    [0, 8)          [8, 16)
"""

from collections.abc import Sequence

from pilotlight.policy.model import Stage


def remaining(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Places of the stages that remain, in the order of their layers; empty where a group is to be
    no shorter pipeline: its stages are what they were, or one of them is to have all layers.

    Args:
        stages: That the workers of a group are to have, in any order.
    """
    kept = [
        at
        for at, one in enumerate(stages)
        if not any(one.is_within(other) for beside, other in enumerate(stages) if beside != at)
    ]
    kept.sort(key=lambda at: stages[at].start)
    ends = [0, *(stages[at].stop for at in kept)]
    follow = all(stages[at].start == stop for at, stop in zip(kept, ends, strict=False))
    shorter = 1 < len(kept) < len(stages)
    return tuple(kept) if shorter and follow else ()
