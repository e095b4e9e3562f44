"""What stages do for later: one at a time, those that have nothing else to do."""

from types import SimpleNamespace
from typing import Any, cast

from pilotlight.engine.held_stages import HeldStages
from pilotlight.policy.ids import InstanceId


class Pieces:
    """Some to be done."""

    def __init__(self, count: int) -> None:
        self.left = count

    @property
    def is_over(self) -> bool:
        return not self.left

    def one(self) -> None:
        self.left -= 1


def stage(*ahead: Pieces, **changes: object) -> Any:
    quiet = {"complete": True, "pipeline": None, "in_flight": 0}
    return SimpleNamespace(compute=SimpleNamespace(ahead=ahead), **(quiet | changes))


def held(*stages: Any) -> HeldStages:
    return HeldStages(
        {InstanceId(f"i{number}"): cast("Any", one) for number, one in enumerate(stages)}
    )


def test_what_a_stage_has_to_do_first_is_done_first() -> None:
    graphs, lengths, others = Pieces(2), Pieces(1), Pieces(1)
    stages = held(stage(graphs, lengths), stage(), stage(others))
    seen: list[tuple[int, int, int]] = []
    while stages.prepare():
        seen.append((graphs.left, lengths.left, others.left))
    assert seen == [(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0)]
    lengths.left = 1
    assert stages.prepare(), "more is wanted later"
    assert lengths.is_over


def test_stages_that_load_or_run_or_are_of_a_pipeline_do_nothing_for_later() -> None:
    pieces = [Pieces(1) for _ in range(3)]
    stages = held(
        stage(pieces[0], complete=False),
        stage(pieces[1], pipeline=object()),
        stage(pieces[2], in_flight=1),
    )
    assert not stages.prepare()
    assert [one.left for one in pieces] == [1, 1, 1]
