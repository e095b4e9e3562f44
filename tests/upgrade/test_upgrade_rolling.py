"""Releases that run together: the one before on this one's schema, then replaced process by process
while requests run.
"""

import asyncio
from pathlib import Path

import pytest
from mixed_system import GATEWAYS, PROCESSES, MixedSystem, mixed_system
from releases import THIS, Code

from pilotlight.common.testing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MODEL = "ember"
CLIENTS = 2
STEP_DEADLINE_S = 90.0


class Load:
    """Clients that ask again and again; each answer must be the one that an undisturbed system
    gave.
    """

    def __init__(self, system: MixedSystem, expected: str) -> None:
        self.answers = 0
        self._system = system
        self._expected = expected
        self._tasks = [asyncio.create_task(self._ask(), name="client") for _ in range(CLIENTS)]
        self._ending = False

    async def goes_on(self) -> None:
        """Return when every client has had an answer since; raise what went wrong with one."""
        wanted = self.answers + 2 * CLIENTS

        def answered() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self.answers >= wanted

        await until(answered, deadline_s=STEP_DEADLINE_S)

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _ask(self) -> None:
        while not self._ending:
            assert await self._system.chat(MODEL) == self._expected
            self.answers += 1


async def warm_and_cold(system: MixedSystem) -> str:
    """A cold start and a warm request give the same."""
    await system.evict(MODEL)
    cold = await system.chat(MODEL)
    assert await system.chat(MODEL) == cold
    return cold


@pytest.mark.e2e
async def test_the_control_plane_of_the_release_before_with_this_ones_schema_and_workers(
    folder: Path, release: Code
) -> None:
    async with mixed_system(
        folder, {name: THIS if name == "loader" else release for name in PROCESSES}
    ) as system:
        await system.register(MODEL)
        await warm_and_cold(system)
        assert not system.complaints()


@pytest.mark.chaos
async def test_a_rolling_upgrade_fails_no_request(folder: Path, release: Code) -> None:
    """The release before works on this one's schema; then one process after the other is
    replaced.
    """
    async with mixed_system(folder, dict.fromkeys(PROCESSES, release), handover=True) as system:
        await system.register(MODEL)
        expected = await system.chat(MODEL)
        assert await system.chat(MODEL) == expected

        async def billed() -> bool:
            return (
                len(
                    await system.query(
                        "SELECT 1 FROM gateway.usage WHERE model = %s AND status = 'ok'", MODEL
                    )
                )
                == 2
            )

        await until(billed)
        load = Load(system, expected)
        await load.goes_on()
        for name in ("cache", "scheduler", "materializer"):
            await system.relieve(name, THIS)
            await load.goes_on()
        await system.replace("loader", THIS)
        await load.goes_on()
        await system.renew_workers()
        for name in GATEWAYS:
            await system.replace(name, THIS)
            await load.goes_on()
        await load.end()
        assert await warm_and_cold(system) == expected
        assert not system.complaints()


OLD_ONES = (*PROCESSES, "gateway and scheduler")


@pytest.mark.chaos
@pytest.mark.parametrize("old", OLD_ONES)
async def test_one_process_of_the_commit_before_among_this_ones(
    folder: Path, commit: Code, old: str
) -> None:
    """Also the other way round: the rest of this commit serves with it, warm and cold."""
    names = GATEWAYS if old == "gateway" else old.split(" and ")
    async with mixed_system(
        folder, {name: commit if name in names else THIS for name in PROCESSES}
    ) as system:
        await system.register(MODEL)
        await warm_and_cold(system)
        assert not system.complaints()


@pytest.mark.chaos
@pytest.mark.parametrize("new", OLD_ONES)
async def test_one_process_of_this_commit_among_those_of_the_commit_before(
    folder: Path, commit: Code, new: str
) -> None:
    names = GATEWAYS if new == "gateway" else new.split(" and ")
    async with mixed_system(
        folder, {name: THIS if name in names else commit for name in PROCESSES}
    ) as system:
        await system.register(MODEL)
        await warm_and_cold(system)
        assert not system.complaints()
