"""Seeded schedules of what goes wrong while a model goes from node to node, with real loader
processes.

Each ends in the right bytes by another way, or in a typed error within a deadline. An engine's
client looks at every byte of every part that it is given: never is one of them partial or wrong.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
from chaos.engine_reads import RIGHT
from chaos.transfer_plans import draw
from chaos.transfer_runs import Run
from chaos.transfer_tally import TransferTally
from chaos.transfers import BUCKET, Transfers
from loader_processes import LoaderProcesses
from standin_s3 import StandinS3, running_s3

from pilotlight.common.clock import SystemClock
from pilotlight.common.errors import PilotlightError
from pilotlight.common.nats_bus import NatsBus
from pilotlight.common.nats_streams import ensure_events
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import EVENTS_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.chaos]

SEEDS = os.environ.get("PILOTLIGHT_TRANSFER_SEEDS", "")
"""One seed, or the first and the last, instead of all."""
FAST = 8
"""Schedules that are part of ``make test-e2e`` as well."""
SCHEDULES = 300
SHARD = 73
"""Schedules of one test: some minutes on a slow machine."""
SYSTEMS = 3
"""That go through schedules at the same time."""


def failed(failures: dict[int, list[str]]) -> str:
    """What went wrong, and how to see it again."""
    lines: list[str] = []
    for seed, problems in sorted(failures.items()):
        lines.append(f"PILOTLIGHT_TRANSFER_SEEDS={seed} python -m pytest {Path(__file__)} -s")
        lines += [f"    {problem}" for problem in problems]
    return "\n".join(lines)


def shards() -> list[object]:
    """Ranges of seeds, each with its marks."""
    if SEEDS:
        first, _, last = SEEDS.partition("-")
        return [pytest.param(range(int(first), int(last or first) + 1), id=SEEDS)]
    starts = [0, *range(FAST, SCHEDULES, SHARD)]
    ranges = [
        range(start, end) for start, end in zip(starts, [*starts[1:], SCHEDULES], strict=True)
    ]
    return [
        pytest.param(
            seeds, id=f"{seeds[0]}-{seeds[-1]}", marks=[pytest.mark.e2e] if seeds[-1] < FAST else []
        )
        for seeds in ranges
    ]


@pytest.fixture(scope="module")
def s3() -> Iterator[StandinS3]:
    with running_s3(BUCKET) as server:
        yield server


@pytest.mark.parametrize("seeds", shards())
async def test_transfers(
    seeds: range,
    nats_url: str,
    s3: StandinS3,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    waiting, tally = iter(seeds), TransferTally()
    failures: dict[int, list[str]] = {}

    async def work(number: int, transfers: Transfers) -> None:
        structlog.contextvars.bind_contextvars(system=number)
        await transfers.start()
        for seed in waiting:
            run, clock = Run(transfers, draw(seed)), SystemClock()
            began_s = clock.monotonic_s()
            try:
                await run.go()
            except (PilotlightError, AssertionError) as error:
                run.problems.append(f"it could not be carried out: {error!r}")
                await transfers.renew_all()
            tally.add(run)
            if run.problems:
                failures[seed] = [run.plan.line(), *run.problems]
            if SEEDS:
                reads = {
                    name: (read.outcome, round(read.seconds, 2)) for name, read in run.reads.items()
                }
                took_s = clock.monotonic_s() - began_s
                print(
                    f"seed {seed} ({took_s:.1f} s): {run.plan.line()}: {reads} {run.problems}",
                    file=sys.__stderr__,
                )

    async with AsyncExitStack() as stack:
        systems: list[Transfers] = []
        for index in range(min(SYSTEMS, len(seeds))):
            folder = tmp_path / str(index)
            (folder / "models").mkdir(parents=True)
            settings = BusSettings(
                nats_url=nats_url, prefix=f"c{secrets.token_hex(6)}.", secrets_dir=None
            )
            bus = await NatsBus.connect(settings, user="test", name=f"test-{index}")
            stack.push_async_callback(bus.close)
            await ensure_events(bus.client, settings.prefix, EVENTS_BYTES)
            processes = LoaderProcesses(folder, bus, settings, roots=f"s3://{BUCKET}")
            stack.push_async_callback(processes.stop)
            systems.append(Transfers(processes, s3))
        await asyncio.gather(*(work(number, system) for number, system in enumerate(systems)))
    record_property("transfers", tally.counts())
    if failures:
        pytest.fail(failed(failures), pytrace=False)
    assert (tally.schedules, tally.wrong) == (len(seeds), 0)
    assert any(outcomes[RIGHT] for outcomes in tally.outcomes.values())
