"""Two schedulers fight for the lease, each in turn with its clock stopped: one leads, and nothing
is loaded twice.
"""

import asyncio
from collections.abc import Iterator

import httpx2
import pytest
from chaos.checks import Allowed, check
from chaos.clients import until
from chaos.processes import Found, Target, stop, wake
from chaos.situations import Situation, arrange
from chaos.system import ChaosSystem
from chaos.tally import TALLY

FAILOVER_S = 3.0
ROUNDS = 3


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[ChaosSystem]:
    failed_before = request.session.testsfailed
    system = ChaosSystem("--schedulers", "2")
    try:
        asyncio.run(system.calm_down())
        yield system
    finally:
        system.spoiled = request.session.testsfailed > failed_before
        system.close()


async def epoch_of(system: ChaosSystem, scheduler: Found) -> int:
    """The epoch of a scheduler's term by its own word; 0 while it stands by."""
    transport = httpx2.AsyncHTTPTransport(
        uds=str(system.home.run_dir / f"scheduler-{scheduler.pid}.sock")
    )
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://local", timeout=5.0
    ) as http:
        page = (await http.get("/metrics")).text
    return int(
        float(
            next(
                line.split()[-1]
                for line in page.splitlines()
                if line.startswith("pilotlight_scheduler_epoch ")
            )
        )
    )


async def epoch_in_row(system: ChaosSystem) -> int:
    return (await system.query("SELECT epoch FROM scheduler.lease"))[0][0]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("situation", [Situation.HALF, Situation.STREAMING])
async def test_a_stopped_leader_is_replaced_and_obeyed_no_more(
    pair: ChaosSystem, situation: Situation
) -> None:
    for number in range(ROUNDS):
        TALLY.cells += 1
        scene = await arrange(pair, situation)
        schedulers = pair.processes.of(Target.SCHEDULER)
        leaders = [one for one in schedulers if await epoch_of(pair, one)]
        assert len(leaders) == 1, "one of two leads"
        before = await epoch_in_row(pair)
        stopped = stop(pair.processes, leaders)
        try:
            standby = next(one for one in schedulers if one not in leaders)

            async def leads(standby: Found = standby) -> str | None:
                return None if await epoch_of(pair, standby) else "the standby stands by"

            await until(leads, FAILOVER_S, "failover")
            if situation is Situation.HALF:
                # The cold start that the old leader began goes on under the new one.
                await asyncio.wait([one.task for one in scene.requests], timeout=30.0)
        finally:
            wake(stopped)
        assert await epoch_in_row(pair) > before
        cold = situation is Situation.HALF
        await check(
            pair,
            scene,
            Allowed(instances=int(cold)),
            f"stopped leader, {situation}, round {number}",
        )
        assert not await epoch_of(pair, leaders[0]), "the old leader leads again"
        for worker in await pair.view("workers"):
            assert all(stage["state"] != "failed" for stage in worker["held"])
        if cold:
            await pair.forget(scene.model)
