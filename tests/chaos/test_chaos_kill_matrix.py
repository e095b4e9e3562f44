"""The kill matrix: each service, killed, stopped (for a while or for good) or restarted, in each
situation.

Nothing is lost, nothing is repeated.
"""

import asyncio
from dataclasses import dataclass

import pytest
from chaos.checks import COLD, check, justified
from chaos.processes import Fault, Target, inflict
from chaos.situations import Situation, arrange
from chaos.system import ChaosSystem
from chaos.tally import TALLY


@dataclass(frozen=True)
class Cell:
    """One fault in one situation."""

    fault: Fault
    target: Target
    situation: Situation

    def __str__(self) -> str:
        return f"{self.fault} {self.target}, {self.situation}"


SITUATIONS = (
    Situation.IDLE,
    Situation.HELD,
    Situation.HALF,
    Situation.STREAMING,
    Situation.WRITING,
)
CELLS = (
    *(Cell(Fault.KILL, target, situation) for target in Target for situation in SITUATIONS),
    *(
        Cell(Fault.STOP, target, situation)
        for target in Target
        for situation in (Situation.HALF, Situation.STREAMING)
    ),
    *(
        Cell(Fault.HANG, target, situation)
        for target in (Target.ENGINE, Target.WORKER)
        for situation in (Situation.HALF, Situation.STREAMING)
    ),
    *(
        Cell(fault, target, Situation.LOAD)
        for target in (Target.NATS, Target.POSTGRES)
        for fault in (Fault.KILL, Fault.RESTART)
    ),
)
FAST = {
    Cell(Fault.KILL, Target.ENGINE, Situation.STREAMING),
    Cell(Fault.KILL, Target.GATEWAY, Situation.STREAMING),
    Cell(Fault.KILL, Target.NATS, Situation.STREAMING),
    Cell(Fault.KILL, Target.SCHEDULER, Situation.HALF),
}
"""Part of ``make test-e2e`` as well."""


def parameters() -> list[object]:
    assert set(CELLS) >= FAST
    return [
        pytest.param(cell, id=str(cell), marks=[pytest.mark.e2e] if cell in FAST else [])
        for cell in CELLS
    ]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("cell", parameters())
async def test_nothing_is_lost(cell: Cell, system: ChaosSystem) -> None:
    TALLY.cells += 1
    scene = await arrange(system, cell.situation)
    victims = system.processes.hit(cell.target, scene.worker_id)
    assert victims, f"there is no {cell.target}"
    await asyncio.to_thread(inflict, cell.fault, system.processes, victims)
    await check(system, scene, justified(cell.target, cell.situation, cell.fault), str(cell))
    if scene.situation in COLD:
        await system.forget(scene.model)
